"""Heartbeats for all workers of a host, in one call."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.liveness.beat_board import BeatSlot, MembershipEnding, SlotClaim, beat_of
from shoal_client.membership import calls as membership_calls
from shoal_proto.errors import ShoalError, UnknownJob
from shoal_proto.status import from_detail
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

log = structlog.get_logger(__name__)

IDLE_S = 0.2
"""The board is read this often while no worker has claimed its slot."""
ASKS_EVERY_S = 0.5
"""Interval between calls about a worker that gets no notices itself."""
CALL_TIMEOUT_S = 2.0
"""A call that hangs does no harm: workers then send their own heartbeats."""


@dataclass(kw_only=True)
class _Watched:
    slot: BeatSlot
    pid: int
    job: str
    halted: bool = False

    @property
    def status_query(self) -> Token | None:
        """Job to ask about, and the claimed member (none without a claim). None if the process gets
        notices itself, or has no claim and was not halted before it joined.
        """
        claim = self.slot.claim_of(self.pid)
        if claim is None:
            return Token(job=self.job) if self.halted and not self.slot.has_left else None
        notified = self.slot.claimed(self.pid) and self.slot.ending is MembershipEnding.UNKNOWN
        return None if notified and not self.halted else claim.token


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """Status of a worker, according to a coordinator."""

    pid: int
    job: str
    phase: str
    """Empty: no such job."""
    lost_incarnation: str = ""
    """Incarnation that the worker claims, if the job does not have its member; else empty."""


class HostBeats:
    """Sends heartbeats for every running process that has claimed its slot. If these heartbeats are
    not accepted, the worker sends its own.
    """

    def __init__(
        self, coordinators: Sequence[str], on_standing: Callable[[WorkerStatus], None]
    ) -> None:
        """`on_standing`: gets the status of workers that get no notices."""
        self._on_standing = on_standing
        self._asks_at_s = 0.0
        self.coordinators = Coordinators(coordinators)
        """Open within the `with` block, also for other parts of the launcher."""
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

    def started(self, pid: int, slot: BeatSlot, job: str) -> None:
        """Send heartbeats for the process as soon as it has claimed the slot."""
        with self._lock:
            self._watched[pid] = _Watched(slot=slot, pid=pid, job=job)

    def ended(self, pid: int) -> None:
        """Stop sending heartbeats for the process."""
        with self._lock:
            self._watched.pop(pid, None)

    def halted(self, pid: int, halted: bool) -> None:
        """Set whether SIGSTOP has suspended the process: no heartbeats are sent meanwhile."""
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
            if time.monotonic() >= self._asks_at_s:
                self._ask_for_others()

    def _claims(self) -> list[tuple[BeatSlot, SlotClaim]]:
        with self._lock:
            running = [each for each in self._watched.values() if not each.halted]
        claims = ((each.slot, each.slot.claimed(each.pid)) for each in running)
        return [(slot, claim) for slot, claim in claims if claim is not None]

    def _ask_for_others(self) -> None:
        with self._lock:
            asked = [(each.pid, of) for each in self._watched.values() if (of := each.status_query)]
        if asked:
            self._asks_at_s = time.monotonic() + ASKS_EVERY_S
        for pid, token in asked:
            request = pb.GetJobRequest(job=token.job)
            try:
                standing = self.coordinators.call(
                    membership_calls.get_job, request, timeout_s=CALL_TIMEOUT_S
                )
            except UnknownJob:
                standing = pb.JobStanding()
            except ShoalError as error:
                log.debug("job_status_unknown", job=token.job, reason=str(error))
                continue
            is_lost = token.member_id not in standing.member_ids
            self._on_standing(
                WorkerStatus(
                    pid=pid,
                    job=token.job,
                    phase=standing.phase,
                    lost_incarnation=token.incarnation if is_lost else "",
                )
            )

    def _send(self, claims: Sequence[tuple[BeatSlot, SlotClaim]]) -> None:
        request = pb.HeartbeatRequest(
            beats=[beat_of(claim.token, claim.step, claim.status) for _, claim in claims]
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
                # The script may never report that the worker is fenced.
                slot.record_refused_heartbeat(claim, from_detail(answer.error))
            else:
                slot.record_accepted_heartbeat(claim)
