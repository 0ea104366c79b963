"""Private parts of DTensor: local parts, their offsets, and what torch keeps of a mesh."""

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
    """Drop cached sharding derivations, which may be for old meshes."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


local_shape_and_offset = compute_local_shape_and_global_offset


def cut_as(cut: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the shape and sharding of `cut`.

    `local` is this rank's part of the result, and must not be part of an autograd graph. The call
    takes a third of the time of `DTensor.from_local`.
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
    """Return this rank's part of a DTensor, outside of autograd.

    `to_local` takes ten times as long with gradients enabled.
    """
    local: Tensor = tensor._local_tensor
    return local


def all_local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local_of` of each DTensor."""
    return list(map(_LOCAL, tensors))


def gradient_cut_as(parameter: DTensor, gradient: DTensor) -> DTensor:
    """Return the gradient with the sharding of the parameter.

    Before torch 2.13 some gradients are whole on each rank.
    """
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop the process groups that the mesh and its root mesh refer to.

    Otherwise reference cycles through sharded modules keep the groups alive (seen with torch 2.13
    and 2.15).
    """
    held: Any = mesh
    for each in (held, getattr(held, "_root_mesh", None)):
        getattr(each, "_pg_registry", {}).clear()


def mark_meshes_by(descriptor: Any | None) -> None:
    """Set the attribute by which torch distinguishes equal meshes in different threads; None
    removes the attribute."""
    mesh_class: Any = DeviceMesh
    if descriptor is None:
        del mesh_class._thread_id
    else:
        mesh_class._thread_id = descriptor


def serialise_shape_derivation(on: bool) -> None:
    """Let only one thread derive shapes at a time; with `on` false, any number again.

    torch's derivation is not thread-safe.
    """
    _propagator._fake_mode_lock = threading.Lock() if on else contextlib.nullcontext()


def _lock_shape_derivation() -> None:
    """Add the lock of torch 2.13 to releases up to 2.11, which have none."""
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
    """Keep torch from replacing its guard of CUDA devices; with `on` false, let torch do so again.

    A CUDA build without a GPU (torch 2.11 to 2.15) replaces the guard at each shape derivation. The
    process crashes by SIGSEGV if two threads do so.
    """
    if _replace_guard is not None:
        _native._ensureCUDADeviceGuardSet = (lambda: None) if on else _replace_guard


_native: Any = torch._C
_replace_guard: Any = getattr(_native, "_ensureCUDADeviceGuardSet", None)
