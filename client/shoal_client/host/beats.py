"""Heartbeats for all workers of a host, in one call."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.liveness.beat_board import BeatSlot, SlotClaim, beat_of
from shoal_client.membership import calls as membership_calls
from shoal_proto.errors import ShoalError
from shoal_proto.status import from_detail
from shoal_proto.v1 import membership_pb2 as pb

log = structlog.get_logger(__name__)

IDLE_S = 0.2
"""How often the board is looked at while no worker has claimed its slot."""
CALL_TIMEOUT_S = 2.0
"""Meanwhile the workers beat by themselves: a call that hangs harms nobody."""


@dataclass(kw_only=True)
class _Watched:
    slot: BeatSlot
    pid: int
    halted: bool = False


class HostBeats:
    """Beats for every process that runs and has claimed its slot, from a thread of its own.

    What a coordinator refuses is the worker's to learn too, which beats by itself once the
    launcher's beats are not accepted.
    """

    def __init__(self, coordinators: Sequence[str]) -> None:
        self.coordinators = Coordinators(coordinators)
        """Open within the block; others of the launcher's may call over it, too."""
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._closing = threading.Event()
        self._reached = True
        self._thread = threading.Thread(target=self._beat, name="shoal-host-beats", daemon=True)

    def __enter__(self) -> "HostBeats":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self.coordinators.close()
        self._thread.join()

    def started(self, pid: int, slot: BeatSlot) -> None:
        """Beat for the process as soon as it has claimed the slot."""
        with self._lock:
            self._watched[pid] = _Watched(slot=slot, pid=pid)

    def ended(self, pid: int) -> None:
        """The process is gone."""
        with self._lock:
            self._watched.pop(pid, None)

    def halted(self, pid: int, halted: bool) -> None:
        """Whether a signal halts the process: then it does not live, as far as its job goes."""
        with self._lock:
            if pid in self._watched:
                self._watched[pid].halted = halted

    def _beat(self) -> None:
        next_s = time.monotonic()
        while not self._closing.wait(max(0.0, next_s - time.monotonic())):
            claims = self._claims()
            interval_s = min((claim.heartbeat_s for _, claim in claims), default=IDLE_S)
            next_s = time.monotonic() + interval_s
            if claims:
                self._send(claims)

    def _claims(self) -> list[tuple[BeatSlot, SlotClaim]]:
        with self._lock:
            running = [each for each in self._watched.values() if not each.halted]
        claims = ((each.slot, each.slot.claimed(each.pid)) for each in running)
        return [(slot, claim) for slot, claim in claims if claim is not None]

    def _send(self, claims: Sequence[tuple[BeatSlot, SlotClaim]]) -> None:
        request = pb.HeartbeatRequest(
            beats=[beat_of(claim.token, claim.step, claim.doing) for _, claim in claims]
        )
        try:
            reply = self.coordinators.call(
                membership_calls.heartbeat, request, timeout_s=CALL_TIMEOUT_S
            )
        except ShoalError as error:
            if self._reached and not self._closing.is_set():
                log.info("host_beats_failed", num_members=len(claims), reason=str(error))
            self._reached = False
            return
        self._reached = True
        for (slot, claim), answer in zip(claims, reply.replies, strict=True):
            if answer.HasField("error"):
                # A worker whose script never hears of it is known to be fenced all the same.
                slot.refused(claim, from_detail(answer.error))
            else:
                slot.accepted(claim)
