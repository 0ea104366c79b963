"""Private names of torch.distributed: types of stores, the table of groups, Gloo groups."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as _native
from torch._C._distributed_c10d import (
    GradBucket,
    HashStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    _compute_bucket_assignment_by_size,
)
from torch.distributed import distributed_c10d as _c10d

# Public at run time, but missing from the type stubs of `torch.distributed`.
__all__ = ["GradBucket", "HashStore", "ProcessGroupGloo", "Store", "TCPStore"]

all_gather_single: Any = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
)
"""torch 2.13 renamed these two functions, and warns of the old names."""

bucket_assignment = _compute_bucket_assignment_by_size
pg_config_info = _c10d._World.pg_config_info
"""The only property of torch's table of groups that is computed, not stored."""

_GOOD = "SUCCESS"


def gloo_options(address: str, *, timeout_s: float) -> Any:
    """Return options of a Gloo group that connects from this address, with this timeout."""
    make: Any = ProcessGroupGloo
    options = make._Options()
    options._devices = [make.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return options


def backend_on(group: Any, device: torch.device) -> Any:
    """Return the backend that runs the group's operations on the device."""
    return group._get_backend(device)


def takes_batches(group: Any, device: torch.device) -> bool:
    """True if the backend on this device can run several operations as one, as NCCL can.

    Issued one by one, each operation would wait on the stream for the previous one.
    """
    try:
        return bool(backend_on(group, device).supports_coalescing)
    except RuntimeError:
        return False  # the group has no backend for this device


def batched(group: Any, device: torch.device, begin: Callable[[], object]) -> Any:
    """Run all operations that `begin` issues on the device as one; return its work."""
    group._start_coalescing(device)
    try:
        begin()
    finally:
        work = group._end_coalescing(device)
    return work


def timeout_of(group: Any, device: torch.device) -> float:
    """Return the timeout, in seconds, of the group's operations on the device."""
    return float(backend_on(group, device).options._timeout.total_seconds())


def groups_table() -> Any:
    """Return torch's table of this process' groups, or the table that replaced it."""
    return _c10d._world


def replace_groups_table(table: Any) -> None:
    """Make torch look up its groups in this table."""
    _c10d._world = table


def forget_groups() -> None:
    """Remove all groups from torch's table without waiting for their operations.

    torch's own functions would wait.
    """
    _c10d._world.pg_names.clear()
    _c10d.destroy_process_group()


def all_groups() -> Mapping[Any, Any]:
    """Return all groups in torch's table."""
    groups: Mapping[Any, Any] = _c10d._world.pg_map
    return groups


def fault_on(device: torch.device) -> str:
    """Return the name of the first error that a backend on the device reports; empty: none."""
    return next(
        (name for each in backends_on(device) if (name := each.get_error().name) != _GOOD), ""
    )


def backends_on(device: torch.device) -> list[Any]:
    """Return the backend on the device of each group that has one. Callable from any thread."""
    backends: list[Any] = []
    for group in list(all_groups()):
        try:
            backends.append(group._get_backend(device))
        except RuntimeError:
            continue  # a group without a backend for this device
    return backends


def isolate_threads(on: bool) -> None:
    """Give each thread its own registry of groups in C++; with `on` false, share one again."""
    native: Any = _native
    native._set_thread_isolation_mode(on)
