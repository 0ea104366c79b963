"""A Gloo group that is reconnected in each generation, by torch's own `reconfigure`.

Members exchange handles, reconnect, and then exchange outcomes, through the generation's store. If
a member failed, all members make a new group.
"""

import weakref
from typing import Any

import structlog

from shoal.backends.network import retired
from shoal.backends.network.stores import AddressStore, AnnouncingStore
from shoal.backends.process_group.interface import Seat
from shoal.torch_private.c10d import (
    HashStore,
    ReconfigurableGloo,
    Store,
    reconfigured_address_key,
)
from shoal_proto.errors import GenerationBroken, ShoalError

log = structlog.get_logger(__name__)

RECONFIGURE_S = 15.0
"""Time limit of a reconfiguration."""
MAX_REASON_CHARS = 300
_READY, _FAILED = b"ready", b"failed: "


class LiveGloo:
    """The reconfigurable Gloo group of one process. Used only by the trainer."""

    def __init__(self) -> None:
        self._store = _CurrentStore(HashStore())
        self._live: list[ReconfigurableGloo] = []
        # Freeing joins the group's threads, for which neither the trainer nor the exit may wait.
        weakref.finalize(self, _free, self._live)

    def connect(self, seat: Seat, store: Store) -> Any | None:
        """Return Gloo's group, connected for this seat; None, on all members, if a member failed.

        Raises GenerationBroken if the store is aborted meanwhile, and DeadlineExceeded if a member
        does not write to it.
        """
        messages = _GroupMessages(seat, store)
        try:
            self._store.move_to(_Addresses(store, seat))
            handle, failure = self._handle(seat).encode(), b""
        except (RuntimeError, ShoalError) as error:
            handle, failure = b"", _failed(error)
        handles = messages.exchange("handle", failure or handle)
        if not _faults(handles):
            failure = self._reconfigure(seat, handles, messages)
            handles = messages.exchange("outcome", failure or _READY)
        if faults := _faults(handles):
            log.warning(
                "reconfigure_failed",
                generation=seat.generation,
                reason="; ".join(faults),
                consequence="all members make a new group for this generation",
            )
            self.drop()
            return None
        return self._live[0].gloo

    def drop(self) -> None:
        """Drop the group: an operation in it may never end. The next generation makes a new
        group."""
        _free(self._live)

    def _handle(self, seat: Seat) -> str:
        address, timeout_s = seat.address, seat.collective_s
        if self._live:
            # `cut` finds the generation's connections by its listener.
            self._live[0].renew(address=address, timeout_s=timeout_s)
        else:
            group = ReconfigurableGloo(
                self._store, seat.rank, seat.world_size, address=address, timeout_s=timeout_s
            )
            self._live.append(group)
        return self._live[0].handle()

    def _reconfigure(self, seat: Seat, handles: list[bytes], messages: "_GroupMessages") -> bytes:
        try:
            self._live[0].reconfigure(
                seat.generation,
                [handle.decode() for handle in handles],
                timeout_s=min(seat.bring_up_s, RECONFIGURE_S),
            )
        except GenerationBroken:
            raise
        except (RuntimeError, ShoalError) as error:
            failure = _failed(error)
            # Else the other ranks would wait for this rank's address until the limit.
            messages.set(reconfigured_address_key(seat.generation, seat.rank), failure)
            return failure
        return b""


def _free(live: list[ReconfigurableGloo]) -> None:
    groups, live[:] = list(live), []
    if groups:
        retired.retire(groups)


def _failed(error: Exception) -> bytes:
    return _FAILED + f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS].encode()


def _faults(values: list[bytes]) -> list[str]:
    return [
        f"rank {rank} {value.decode(errors='replace')}"
        for rank, value in enumerate(values)
        if value.startswith(_FAILED)
    ]


class _GroupMessages:
    def __init__(self, seat: Seat, store: Store) -> None:
        self._seat, self._store = seat, store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes too

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        keys = [f"live/{what}/{rank}" for rank in range(self._seat.world_size)]
        self.set(keys[self._seat.rank], value)
        return [bytes(each) for each in self._store.multi_get(keys)]


class _Addresses(AddressStore):
    """Store of addresses in which a rank that could not reconfigure writes its failure."""

    def __init__(self, store: Store, seat: Seat) -> None:
        super().__init__(store, seat.rank, seat.world_size)

    def _address(self, key: str, value: bytes) -> bytes:
        if bytes(value).startswith(_FAILED):
            raise RuntimeError(f"a peer's reconnection {bytes(value).decode(errors='replace')}")
        return super()._address(key, value)


class _CurrentStore(AnnouncingStore):
    def move_to(self, store: Any) -> None:
        self._inner = store
        self._values = {}
