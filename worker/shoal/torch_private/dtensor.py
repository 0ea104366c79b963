"""Of DTensor: where a rank's part lies, and what is kept of a mesh."""

import contextlib
import functools
import threading
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

try:  # torch 2.11 and newer
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
except ImportError:

    def _clear_sharding_prop_cache() -> Any:
        propagator: Any = DTensor._op_dispatcher.sharding_propagator
        return propagator.propagate_op_sharding.cache.cache_clear()


def clear_sharding_cache() -> None:
    """Forget what was derived for meshes that are gone."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


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


def gradient_cut_as(parameter: DTensor, gradient: DTensor) -> DTensor:
    """The gradient, cut as the parameter is, which is where it comes so from torch 2.13 on.

    Older releases give some gradients whole to each rank: where strides differ, autograd copies a
    gradient into a new tensor, which is not cut. No message is sent for these.
    """
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


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
    """Let one thread at a time work out shapes, or as many as like: torch does that in a mode which
    two threads must not enter at once."""
    _propagator._fake_mode_lock = threading.Lock() if on else contextlib.nullcontext()


def _lock_shape_derivation() -> None:
    """Take the lock where torch 2.13 takes it. Releases up to 2.11 have none."""
    derive = _propagator._propagate_tensor_meta_non_cached

    @functools.wraps(derive)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _propagator._fake_mode_lock:
            return derive(self, *args, **kwargs)

    _propagator._fake_mode_lock = contextlib.nullcontext()
    _propagator._propagate_tensor_meta_non_cached = locked


_propagator: Any = ShardingPropagator
if not hasattr(_propagator, "_fake_mode_lock"):
    _lock_shape_derivation()


def keep_device_guard(on: bool) -> None:
    """Let torch leave its guard of CUDA devices as it is, or replace it as it likes.

    A CUDA build on a machine without a GPU (torch 2.11 to 2.15) does that whenever shapes are
    worked out, so that they may be those of tensors on a GPU, and ends the process by SIGSEGV if
    two threads do so. Ranks that are threads work there with tensors on the host only.
    """
    if _replace_guard is not None:
        _native._ensureCUDADeviceGuardSet = (lambda: None) if on else _replace_guard


_native: Any = torch._C
_replace_guard: Any = getattr(_native, "_ensureCUDADeviceGuardSet", None)
