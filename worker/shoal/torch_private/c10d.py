"""Of torch.distributed: its stores as types, its table of groups, and what ends a group."""

from collections.abc import Mapping
from typing import Any

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

bucket_assignment = _compute_bucket_assignment_by_size
"""How DDP cuts parameters into buckets."""
abort_process_group = _c10d._abort_process_group
"""Ends a group without waiting for operations that never end."""
pg_config_info = _c10d._World.pg_config_info
"""The one property of torch's table of groups that it computes."""


def groups_table() -> Any:
    """torch's table of this process' groups, or what stands in for it."""
    return _c10d._world


def replace_groups_table(table: Any) -> None:
    """Let torch find its groups in this table from now on."""
    _c10d._world = table


def all_groups() -> Mapping[Any, Any]:
    """Every group that torch knows of."""
    groups: Mapping[Any, Any] = _c10d._world.pg_map
    return groups


def isolate_threads(on: bool) -> None:
    """Whether torch's registry in C++ is one for each thread."""
    native: Any = _native
    native._set_thread_isolation_mode(on)
