"""torch.distributed's registries of groups, one set for each thread, while any thread is a rank of
an in-memory job.

torch's table in Python is replaced by a proxy: a rank's thread sees its own table, and every other
thread sees torch's table and the groups of all ranks. In C++ torch is switched to its mode of one
table for each thread. DTensor's caches for a mesh must not be shared by ranks, so meshes of
different worlds compare unequal.
"""

import itertools
import sys
import threading
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shoal.backends.in_memory.hub import Hub
from shoal.torch_private import c10d, compiling, dtensor
from shoal_proto.errors import InvalidSpec


class RankWorld:
    """Tables of groups of one rank, with the same fields as torch's table."""

    pg_config_info = c10d.pg_config_info

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.number = next(_numbers)
        self.default_pg: dist.ProcessGroup | None = None
        self.group_count = 0
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}
        """Field of torch's table since 2.14."""


class _ThreadWorld(threading.local):
    world: RankWorld | None = None


class _WorldOfThread:
    """Replacement of torch's table of groups. A thread that a rank has started, for example to
    write a checkpoint, can use the rank's groups."""

    def __getattr__(self, name: str) -> Any:
        if _current.world is None and name in _BY_GROUP:
            return ChainMap(
                getattr(_torch_table, name), *[getattr(each, name) for each in list(_bound)]
            )
        return getattr(_current.world or _torch_table, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_current.world or _torch_table, name, value)


class _MeshWorld:
    """Replacement of the attribute by which torch tells meshes of its test threads apart."""

    def __get__(self, mesh: Any, owner: type) -> Any:
        return self if mesh is None else mesh.__dict__["_thread_id"]

    def __set__(self, mesh: Any, mark: int | None) -> None:
        mesh.__dict__["_thread_id"] = _current.world.number if _current.world is not None else mark


_numbers = itertools.count(1)
_current = _ThreadWorld()
_torch_table: Any = c10d.groups_table()
_lock = threading.Lock()
_bound: list[RankWorld] = []
_BY_GROUP = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")


def own_world() -> RankWorld | None:
    """Return this thread's world, or None."""
    return _current.world


def bind(world: RankWorld, initialise: Callable[[], None]) -> None:
    """Let this thread use `world` as its tables of groups, and call `initialise`, which makes
    torch's default group. Raises InvalidSpec if the thread has a default group already."""
    if dist.is_initialized():
        raise InvalidSpec(
            "torch.distributed has a default process group already",
            seen="a group that was not made here",
            expected="none in this thread",
            fix="Run ranks in threads of their own.",
        )
    with _lock:
        if not _bound:
            _install()
        _bound.append(world)
        _current.world = world
        # torch wraps `sys.excepthook` again at each call, and never removes the wrapper.
        hook = sys.excepthook
        try:
            initialise()
        except BaseException:
            _release()
            raise
        finally:
            sys.excepthook = hook


def unbind() -> None:
    """Destroy the groups of this thread's world, if there is one, and leave the world."""
    if _current.world is None:
        return
    try:
        if dist.is_initialized():  # else the rank's own code has destroyed it
            dist.destroy_process_group()
    finally:
        compiling.forget_ddp_forward()
        with _lock:
            _release()


def _release() -> None:
    assert _current.world is not None, "only a bound thread is released"
    _bound.remove(_current.world)
    _current.world = None
    if not _bound:
        _uninstall()


def _install() -> None:
    c10d.replace_groups_table(_WorldOfThread())
    c10d.isolate_threads(True)
    dtensor.mark_meshes_by(_MeshWorld())
    dtensor.serialise_shape_derivation(True)
    dtensor.keep_device_guard(True)


def _uninstall() -> None:
    c10d.replace_groups_table(_torch_table)
    c10d.isolate_threads(False)
    dtensor.mark_meshes_by(None)
    dtensor.serialise_shape_derivation(False)
    dtensor.keep_device_guard(False)
