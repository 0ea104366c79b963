"""Of DTensor: where a rank's part lies, and what is kept of a mesh."""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

clear_sharding_cache = _clear_sharding_prop_cache
"""Forget what was derived for meshes that are gone."""
local_shape_and_offset = compute_local_shape_and_global_offset
"""Sizes and offsets of this rank's part of a DTensor."""


def cut_as(cut: DTensor, local: Tensor) -> DTensor:
    """`local`, which has no graph, as this rank's part of a tensor of the shape of `cut`, which is
    cut as that is.

    What `DTensor.from_local` gives, at a third of the time; and what lies on the host stays there
    on a mesh of GPUs.
    """
    spec: DTensorSpec = cut._spec
    if local.dtype != cut.dtype:
        meta = TensorMeta(shape=cut.shape, stride=cut.stride(), dtype=local.dtype)
        spec = replace(spec, tensor_meta=meta)
    make: Any = DTensor
    placed: DTensor = make(local, spec, requires_grad=False)
    return placed


_LOCAL = attrgetter("_local_tensor")


def local_of(tensor: Any) -> Tensor:
    """What this rank holds of a DTensor: that itself, from which nothing is derived. `to_local`
    takes ten times as long where gradients are computed."""
    own: Tensor = tensor._local_tensor
    return own


def all_local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each DTensor: those themselves, from which nothing is derived."""
    return list(map(_LOCAL, tensors))


def forget_groups(mesh: DeviceMesh) -> None:
    """Let the mesh, and those that it was cut into, hold no process group any more.

    Modules that were laid over it refer to it in circles, so that a group would live on, with its
    connections and threads, until Python looks for those (seen in 2.13 and 2.15).
    """
    held: Any = mesh
    for each in (held, getattr(held, "_root_mesh", None)):
        getattr(each, "_pg_registry", {}).clear()


def mark_meshes_by(descriptor: Any | None) -> None:
    """By what torch tells equal meshes of its own test threads apart; None: by its own mark."""
    mesh_class: Any = DeviceMesh
    if descriptor is None:
        del mesh_class._thread_id
    else:
        mesh_class._thread_id = descriptor


def serialise_shape_derivation(on: bool) -> None:
    """Shapes are worked out in a mode of torch that two threads must not enter at once."""
    propagator: Any = ShardingPropagator
    propagator._fake_mode_lock = threading.Lock() if on else contextlib.nullcontext()
