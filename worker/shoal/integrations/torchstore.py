"""`put_state_dict` and `get_state_dict` with the signatures of TorchStore, over published weights.

    from shoal.integrations import torchstore as ts

Each put of a key is a version of its own, and each get is of one version: a reader never sees
tensors of two puts, and a writer need not wait for readers before it writes again.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.torch_private.checkpoint import flatten_state_dict, unflatten_state_dict
from shoal.weights.script import publish, subscribe
from shoal.weights.subscription import Subscription
from shoal_proto.errors import InvalidSpec

JOB_VARIABLE = "SHOAL_JOB"
COMMIT_S = 600.0
_subscriptions: dict[str, Subscription] = {}


async def put_state_dict(
    state_dict: Mapping[str, Any],
    key: str,
    store_name: str = "TorchStore",
    direct_rdma: bool = False,
    transfer_dtype: torch.dtype | None = None,
) -> None:
    """Publish a state dict, nested or not, as the next version of the key, and return once it is
    committed. `transfer_dtype`: of floating point tensors."""
    flat, _ = flatten_state_dict(dict(state_dict))
    for name, value in flat.items():
        if not isinstance(value, Tensor):
            raise InvalidSpec(
                f"{name} cannot be published", seen=type(value).__name__, expected="a tensor"
            )
    ticket = await asyncio.to_thread(
        publish, series_of(key, store_name), flat, dtype=transfer_dtype
    )
    await asyncio.to_thread(ticket.wait, "committed", COMMIT_S)


async def get_state_dict(
    key: str,
    user_state_dict: Mapping[str, Any] | None = None,
    strict: bool = True,
    store_name: str = "TorchStore",
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """The newest version of the key: written into the tensors of `user_state_dict`, DTensors by
    their own slices, if it is given. With `strict` its names must be those of the version."""
    subscription = _subscriptions.get(series_of(key, store_name))
    if subscription is None:
        subscription = subscribe(series_of(key, store_name))
        _subscriptions[series_of(key, store_name)] = subscription
    if user_state_dict is None:
        return dict(await subscription.fetch_async())
    flat, mapping = flatten_state_dict(dict(user_state_dict))
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    if strict:
        await subscription.fetch_async(into=tensors)
    else:
        found = await subscription.fetch_async()
        for name in tensors.keys() & found.keys():
            tensors[name].copy_(found[name])
    nested: dict[str, Any] = unflatten_state_dict(flat, mapping)
    return nested


def series_of(key: str, store_name: str) -> str:
    """The series of a key: of the job SHOAL_JOB, or of one that is called as the store is."""
    name = "".join(each if each.isalnum() or each in "-_." else "-" for each in key)
    return f"{os.environ.get(JOB_VARIABLE) or store_name}/{name}"
