"""TorchStore's `put_state_dict` and `get_state_dict`, on published weights.

    from shoal.integrations import torchstore as ts

Each put of a key publishes a new version, and each get reads one version: a reader never sees
tensors of two puts, and a writer need not wait for readers before it writes again."""

import asyncio
import os
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

import structlog
import torch
from torch import Tensor

from shoal.weights.reading import write_common
from shoal.weights.script import publish, subscribe
from shoal.weights.subscription import Subscription
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

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
    """Publish a state dict, nested or not, as the key's next version; return once it is committed.

    The first call's `transfer_dtype` applies to floating point tensors of all puts of the key.
    `direct_rdma` has no effect. Raises InvalidSpec for values that are not tensors, for empty
    lists, and for keys that are neither str nor int; DeadlineExceeded after 600 s, or the error
    with which the publication failed.
    """
    series = series_of(key, store_name)
    flat = _flattened(state_dict)
    ticket = await asyncio.to_thread(publish, series, flat, dtype=transfer_dtype)
    await asyncio.to_thread(ticket.wait, "committed", COMMIT_S)


async def get_state_dict(
    key: str,
    user_state_dict: Mapping[str, Any] | None = None,
    strict: bool = True,
    store_name: str = "TorchStore",
    direct_rdma: bool = False,
) -> dict[str, Any]:
    """Return the newest version of the key: no older one than that of a put that has returned.

    A given `user_state_dict` is returned with the version in its tensors; of a DTensor, only the
    local slice is written. With `strict`, its names must be the version's. Otherwise only common
    names are written, and missing ones are logged as `tensors_not_in_version`. Raises InvalidSpec
    for values that are not tensors, and what `Subscription.fetch` raises: VersionGone before the
    first put.
    """
    subscription = _subscribed(series_of(key, store_name))
    if user_state_dict is None:
        return _nested(await subscription.fetch_async())
    flat = _flattened(user_state_dict)
    if strict:
        await subscription.fetch_async(into=flat)
    else:
        weights = await subscription.fetch_async()
        if missing := write_common(weights, flat):
            log.warning("tensors_not_in_version", series=subscription.series, names=missing)
    return dict(user_state_dict)


def reset_client(store_name: str = "TorchStore") -> None:
    """End the subscriptions of a store."""
    job = _job(store_name)
    for series in [each for each in _subscriptions if each.partition("/")[0] == job]:
        _subscriptions.pop(series).close()


def series_of(key: str, store_name: str) -> str:
    """Return the name of a key's series, in the job of the environment variable SHOAL_JOB, or else
    in a job with the store's name. A key that is not a valid name of up to 40 characters gets a
    digest."""
    name = re.sub(r"[^A-Za-z0-9_-]", "-", key)[:40]
    if name != key:
        name = f"{name}-{sha256(key.encode()).hexdigest()[:16]}"
    return f"{_job(store_name)}/{name}"


def _job(store_name: str) -> str:
    return os.environ.get(JOB_VARIABLE) or store_name


def _subscribed(series: str) -> Subscription:
    if series not in _subscriptions:
        _subscriptions[series] = subscribe(series)
    return _subscriptions[series]


def _flattened(state: Any, *above: str) -> dict[str, Tensor]:
    """Return tensors by name: a path of keys, joined by "/". A list's index is "[0]", a tuple's
    "(0)", and an integer key "{0}"; "/", "%" and a leading bracket of another key are escaped."""
    if isinstance(state, Tensor):
        return {"/".join(above): state}
    if isinstance(state, Mapping):
        parts = {_part(key): value for key, value in state.items()}
    elif isinstance(state, list | tuple) and state:
        form = "[{}]" if isinstance(state, list) else "({})"
        parts = {form.format(index): value for index, value in enumerate(state)}
    else:
        raise InvalidSpec(
            f"{'/'.join(above)} cannot be published", seen=repr(state)[:200], expected="a tensor"
        )
    flat: dict[str, Tensor] = {}
    for part, value in parts.items():
        below = _flattened(value, *above, part)
        if not below and not isinstance(state, Mapping):
            # Left out, it would change the indices of later elements.
            raise InvalidSpec(
                f"{'/'.join((*above, part))} cannot be published",
                seen="an element without tensors",
                expected="a tensor",
            )
        flat |= below
    return flat


def _part(key: object) -> str:
    if type(key) is int:
        return f"{{{key}}}"
    if not isinstance(key, str):
        raise InvalidSpec(
            "a key of a state dict cannot be published", seen=repr(key), expected="a str or an int"
        )
    escaped = key.replace("%", "%25").replace("/", "%2F")
    return f"%{ord(key[0]):X}{escaped[1:]}" if key[:1] in _BRACKETS else escaped


_BRACKETS = ("[", "(", "{")


def _nested(weights: Mapping[str, Tensor]) -> dict[Any, Any]:
    """Return the state dict whose tensors have these names, without its empty dicts."""
    tree: dict[str, Any] = {}
    for name, tensor in weights.items():
        *above, last = name.split("/")
        branch = tree
        for each in above:
            branch = branch.setdefault(each, {})
        branch[last] = tensor
    return {_key(part): _rebuilt(branch) for part, branch in tree.items()}


def _rebuilt(branch: Any) -> Any:
    if not isinstance(branch, dict):
        return branch
    kind = next(iter(branch))[:1]
    if kind not in ("[", "("):
        return {_key(part): _rebuilt(below) for part, below in branch.items()}
    ordered = sorted(branch.items(), key=lambda item: int(item[0][1:-1]))
    values = [_rebuilt(below) for _, below in ordered]
    return values if kind == "[" else tuple(values)


def _key(part: str) -> str | int:
    return int(part[1:-1]) if part[:1] == "{" else unquote(part)
