"""The backend "in-memory" of sessions: members that are threads of one process."""

import threading
import time
import uuid
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from shoal.backends.in_memory.group import open_world
from shoal.backends.in_memory.hub import Hub
from shoal.backends.in_memory.worlds import own_world, unbind
from shoal.backends.process_group.collectives import reset_counts
from shoal.backends.process_group.interface import Seat, ended_in_bring_up
from shoal.torch_private.c10d import Store

_TOKEN = "in-memory"
_hubs: MutableMapping[str, Hub] = WeakValueDictionary()
"""Hubs by token. Seats keep their hub alive until they retire."""


class InMemoryBackend:
    """Members that are threads of this process: a `process_group.interface.Backend`."""

    name = "in-memory"
    is_watched = True

    def group(self, seat: Seat, store: Store) -> "InMemorySeat":
        return InMemorySeat(seat, store)

    def stalled_since_s(self, now_s: float) -> float | None:
        return None

    def is_failure(self, error: BaseException) -> bool:
        return isinstance(error, dist.DistError)


class InMemorySeat:
    """A `process_group.interface.Group`. Members find each other by a token in their store."""

    def __init__(self, seat: Seat, store: Any) -> None:
        self._seat = seat
        self._store = store
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._reason = ""

    def open(self) -> dist.ProcessGroup:
        deadline_s = time.monotonic() + self._seat.bring_up_s
        try:
            hub = self._find_hub()
            with self._lock:
                self._hub = hub
            self._raise_if_cut()
            open_world(hub, self._seat.rank)
            group = dist.group.WORLD
            assert group is not None
            group.barrier().wait(timedelta(seconds=max(deadline_s - time.monotonic(), 0.001)))
        except dist.DistError:
            self._raise_if_cut()
            raise
        reset_counts(group)
        return group

    def cut(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason or "the group was cut"
            hub = self._hub
        self._store.abort(self._reason)
        if hub is not None:
            hub.fail(self._reason)

    def check(self) -> None:
        """Do nothing: an operation that was ended by a cut raises by itself."""

    def retire(self) -> None:
        with self._lock:
            hub, self._hub = self._hub, None
        if hub is None:
            return
        hub.end(self._seat.rank)
        world = own_world()
        if world is not None and world.hub is hub:
            unbind()

    def keep_for_ever(self) -> None:
        """Do nothing: every wait here ends at its deadline or when it is cut."""

    def _find_hub(self) -> Hub:
        seat = self._seat
        if seat.rank == 0:
            token = uuid.uuid4().hex
            _hubs[token] = hub = Hub(seat.world_size, seat.collective_s)
            self._store.set(_TOKEN, token)
            return hub
        shared = _hubs.get(bytes(self._store.get(_TOKEN)).decode())
        if shared is None:
            raise dist.DistBackendError(
                f"rank 0 of generation {seat.generation} has left, or is not in this process; "
                'between processes use the backend "gloo"'
            )
        return shared

    def _raise_if_cut(self) -> None:
        with self._lock:
            hub = self._hub
        if self._reason:
            if hub is not None:
                hub.fail(self._reason)
            raise ended_in_bring_up(self._seat.generation, self._reason)
