"""Gloo groups that can be cut: collectives on the CPU that end when a peer is lost.

Gloo cannot abort an operation. So `cut` shuts down the group's connections: waiting operations then
raise within milliseconds. A group that is still connecting may have no connection yet. `cut` then
connects to the member's own listener, and closes that connection.
"""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import structlog
import torch.distributed as dist

from shoal.backends.network import retired
from shoal.backends.network.peer_connections import connected_by
from shoal.backends.network.sockets import listening, shut_connections
from shoal.backends.network.stores import AddressStore, AnnouncingStore
from shoal.backends.process_group.interface import Seat, ended_in_bring_up, refuse_default_group
from shoal.backends.process_group.transports import PLUGIN
from shoal.torch_private.c10d import ProcessGroupGloo, Store, gloo_options
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

# Gloo's errors have no class of their own.
_FAILURE_MARKS = ("gloo", "pair closure", "closed by peer", "connection reset", "timed out waiting")


class GlooBackend:
    """Backend "gloo" of sessions."""

    name = "gloo"
    is_watched = True

    def group(self, seat: Seat, store: Store) -> "GlooGroup":
        return GlooGroup(seat, store)

    def stalled_since_s(self, now_s: float) -> float | None:
        return None

    def is_failure(self, error: BaseException) -> bool:
        if isinstance(error, dist.DistError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(mark in text for mark in _FAILURE_MARKS)


class GlooGroup:
    """See `shoal.backends.process_group.interface.Group`."""

    def __init__(self, seat: Seat, store: Store, *, beside: str = "") -> None:
        """`beside`: an additional backend, such as "cuda:nccl". A cut does not end its
        operations."""
        self._backend = f"cpu:{PLUGIN},{beside}" if beside else PLUGIN
        self._seat = seat
        self._store = AnnouncingStore(store)
        self._lock = threading.Lock()
        self._reason = ""
        self._connecting = False
        self._groups: list[Any] = []
        self._is_default = False

    def open(self) -> dist.ProcessGroup:
        refuse_default_group()
        with self._lock:
            self._raise_if_cut()
            self._connecting = True
        seat = self._seat
        try:
            gloo = self._connect(seat.rank, seat.world_size, self._store)
            _ready.append((self, gloo))
            # torch wraps `sys.excepthook` again at each call, and never removes the wrapper.
            hook = sys.excepthook
            try:
                dist.init_process_group(
                    backend=self._backend,
                    store=self._store,
                    rank=seat.rank,
                    world_size=seat.world_size,
                    timeout=timedelta(seconds=seat.collective_s),
                )
            finally:
                _ready.clear()
                sys.excepthook = hook
                # Set even if torch failed afterwards: `retire` then removes the group.
                self._is_default = dist.is_initialized()
        finally:
            with self._lock:
                self._connecting = False
        self._raise_if_cut()
        default = dist.group.WORLD
        assert default is not None
        self._groups.append(default)
        return default

    def cut(self, reason: str) -> None:
        started_s = time.perf_counter()
        with self._lock:
            is_first = not self._reason
            self._reason = self._reason or reason or "the group was cut"
            connecting = self._connecting
        self._store.abort(self._reason)
        if connecting:
            self._end_accepting()
        connections = shut_connections(self._store.announced)
        if is_first:
            log.debug(
                "group_cut",
                generation=self._seat.generation,
                connections=connections,
                seconds=round(time.perf_counter() - started_s, 4),
                reason=self._reason,
            )

    def check(self) -> None:
        """Do nothing: an operation that was ended by a cut raises by itself."""

    def retire(self) -> None:
        self.retire_group(dist.destroy_process_group)

    def retire_group(
        self, forget: Callable[[], None], also: Iterable[dist.ProcessGroup] = ()
    ) -> None:
        """Retire the group. `forget` removes groups from torch. `also`: groups to free too."""
        # Without these references, DDP's reducer may have the last one, and wait for Gloo's threads
        # with the GIL.
        groups, self._groups = [*self._groups, *also], []
        if self._is_default:
            self._is_default = False
            forget()
        if groups:
            retired.retire(groups)

    def keep_for_ever(self) -> None:
        retired.keep_for_ever(self._groups)

    def _connect(self, rank: int, world_size: int, store: Store) -> Any:
        seat = self._seat
        make: Any = ProcessGroupGloo
        # The limit of operations, not of connecting: the group keeps the limit that it is given.
        options = gloo_options(seat.address, timeout_s=seat.collective_s)
        addresses = AddressStore(store, rank, world_size, limit_s=seat.bring_up_s)
        with self._within_limit():
            gloo = make(addresses, rank, world_size, options)
        self._groups.append(gloo)
        connected_by(gloo, addresses)
        return gloo

    @contextmanager
    def _within_limit(self) -> Iterator[None]:
        seat = self._seat
        late = f"its members were not connected within {seat.bring_up_s:g} s"
        timer = threading.Timer(seat.bring_up_s, self.cut, (late,))
        timer.daemon = True
        timer.start()
        was_connecting, self._connecting = self._connecting, True
        try:
            yield
        except RuntimeError:
            self._raise_if_cut()
            raise
        finally:
            timer.cancel()
            self._connecting = was_connecting

    def _raise_if_cut(self) -> None:
        if self._reason:
            raise ended_in_bring_up(self._seat.generation, self._reason)

    def _end_accepting(self) -> None:
        """Connect to this member's own listener as each peer would, and close the connections. Gloo
        first reads the peer's rank."""
        for address in listening(self._store.announced):
            for rank in range(self._seat.world_size):
                try:
                    with socket.create_connection(address, timeout=0.2) as call:
                        call.sendall(struct.pack("=q", rank))
                except OSError as error:
                    log.debug("listener_closed", address=address, reason=str(error))
                    break


_ready: list[tuple[GlooGroup, Any]] = []
"""The group that is being opened, with its connected Gloo group."""
_current: list[GlooGroup] = []


def _create(options: Any, unused: Any) -> Any:
    if _ready:
        owner, gloo = _ready.pop()
        _current[:] = [owner]
        return gloo
    if not _current:
        raise InvalidSpec(f"the backend {PLUGIN} serves generations of a Shoal session only")
    return _current[0]._connect(options.group_rank, options.group_size, options.store)


dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])
