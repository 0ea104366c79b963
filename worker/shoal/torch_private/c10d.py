"""Of torch.distributed: its stores as types, its table of groups, and what ends a group."""

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

# Public at run time; the types of `torch.distributed` do not have them.
__all__ = ["GradBucket", "HashStore", "ProcessGroupGloo", "Store", "TCPStore"]

all_gather_single: Any = getattr(_c10d, "all_gather_single", None) or _c10d.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(_c10d, "reduce_scatter_single", None) or _c10d.reduce_scatter_tensor
)
"""torch 2.13 renamed these two, and warns of the old names."""

bucket_assignment = _compute_bucket_assignment_by_size
"""How DDP cuts parameters into buckets."""
pg_config_info = _c10d._World.pg_config_info
"""The one property of torch's table of groups that it computes."""

_GOOD = "SUCCESS"


def gloo_options(address: str, *, timeout_s: float) -> Any:
    """For a group that connects from this address of the host, and whose operations take so long at
    the most."""
    make: Any = ProcessGroupGloo
    options = make._Options()
    _connect_from(options, address, timeout_s)
    return options


def _connect_from(options: Any, address: str, timeout_s: float) -> None:
    make: Any = ProcessGroupGloo
    options._devices = [make.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)


CAN_RECONFIGURE = hasattr(_native, "ReconfigureOptions")
"""Whether this torch connects a group that it has anew, to other members: from 2.14 on."""


class ReconfigurableGloo:
    """A Gloo group that is connected once it is reconfigured, and each time that it is again.

    As `init_process_group(enable_reconfigure=True)` and `_reconfigure` do with a default group.
    The store is the one that it was made with, for good.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, address: str, timeout_s: float
    ) -> None:
        make: Any = ProcessGroupGloo
        self._options = gloo_options(address, timeout_s=timeout_s)
        self._options.enable_reconfigure = True
        self.gloo: Any = make(store, rank, world_size, self._options)

    def renew(self, *, address: str, timeout_s: float) -> None:
        """Connect from another listener the next time."""
        # The group reads them from there whenever it connects.
        _connect_from(self._options, address, timeout_s)

    def handle(self) -> str:
        """What the others need of this member to reconfigure."""
        found: str = self.gloo.get_reconfigure_handle()
        return found

    def reconfigure(self, number: int, handles: list[str], *, timeout_s: float) -> None:
        """Connect to the members with these handles, by rank; `number` is never used twice.

        Raises RuntimeError if that fails; the group must not be used then, on any member.
        """
        native: Any = _native
        options = native.ReconfigureOptions()
        options.uuid, options.handles = number, handles
        options.timeout = timedelta(seconds=timeout_s)
        self.gloo.reconfigure(options).wait()


def reconfigured_address_key(number: int, rank: int) -> str:
    """Where a rank tells its address while Gloo reconfigures."""
    return f"reconfigure/{number}/0/{rank}"


def backend_on(group: Any, device: torch.device) -> Any:
    """What carries the group's operations on the device."""
    return group._get_backend(device)


def takes_batches(group: Any, device: torch.device) -> bool:
    """True if several operations on the device can be given to the group as one, as to NCCL: one
    by one, each waits on its stream for the one before, on each rank. Such a backend makes its
    connections with the first operation of a group."""
    try:
        return bool(backend_on(group, device).supports_coalescing)
    except RuntimeError:
        return False  # nothing of the group carries tensors of this device


def batched(group: Any, device: torch.device, begin: Callable[[], object]) -> Any:
    """Give the group all that `begin` begins on the device as one operation; its work."""
    group._start_coalescing(device)
    try:
        begin()
    finally:
        work = group._end_coalescing(device)
    return work


def timeout_of(group: Any, device: torch.device) -> float:
    """Seconds that an operation on the device may take in the group."""
    return float(backend_on(group, device).options._timeout.total_seconds())


def groups_table() -> Any:
    """torch's table of this process' groups, or what stands in for it."""
    return _c10d._world


def replace_groups_table(table: Any) -> None:
    """Let torch find its groups in this table from now on."""
    _c10d._world = table


def forget_groups() -> None:
    """Let torch forget all its groups without ending what they do.

    `destroy_process_group` waits for the operations of each group by name, and
    `_abort_process_group` for each abort in turn.
    """
    _c10d._world.pg_names.clear()
    _c10d.destroy_process_group()


def all_groups() -> Mapping[Any, Any]:
    """Every group that torch knows of."""
    groups: Mapping[Any, Any] = _c10d._world.pg_map
    return groups


def fault_on(device: torch.device) -> str:
    """An error on the device that the backend of a group of this process tells of; empty: none."""
    return next(
        (name for each in backends_on(device) if (name := each.get_error().name) != _GOOD), ""
    )


def backends_on(device: torch.device) -> list[Any]:
    """Backends that carry operations on the device, for each group of this process. Any thread."""
    found: list[Any] = []
    for group in list(all_groups()):
        try:
            found.append(group._get_backend(device))
        except RuntimeError:
            continue  # a group of the host's alone
    return found


def isolate_threads(on: bool) -> None:
    """Whether torch's registry in C++ is one for each thread."""
    native: Any = _native
    native._set_thread_isolation_mode(on)
