"""Memory shared by a launcher and its workers, so that either can send a worker's heartbeats.

A trainer that holds the GIL for seconds (a compiler, CUDA at its start) stops all threads of its
process, also the one that sends heartbeats. So the launcher sends heartbeats for all workers of its
host. It reads their identities from this board: a worker may join again as a new incarnation.

    offset  bytes  written by  what
    0       8      launcher    time of the member's last accepted heartbeat, in ns of
                               CLOCK_MONOTONIC, which is one clock for all processes of a host
    8       8      worker      steps committed
    16      8      worker      time when one of its threads last ran, by the same clock
    24      4      worker      length of the claim; 0: not a member
    28      4      worker      CRC-32 of the claim
    32      8      worker      progress of its bring-up: see `TrainerStatus.moved`
    40      8      worker      0: nothing to report; 1: its trainer waits for others; else the time
                               since which it is in the script's own code, by the same clock: odd
                               while it waits for a batch to be loaded, else even
    48      ..     worker      the claim: its pid, heartbeat and patience in seconds, the token
    944     8      both        how the membership ended: a `MembershipEnding`
    952     72     both        the worker's lifeline, see `shoal_client.liveness.lifeline`

The worker sends its own heartbeats whenever the first field is out of date, so it needs no
launcher. The end of a membership is reported here and not by the exit code: the script may wrap the
error, or end with another error.
"""

import enum
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from google.protobuf.message import DecodeError

from shoal_client.liveness.lifeline import SIZE_BYTES, Lifeline
from shoal_client.liveness.trainer_status import TrainerStatus
from shoal_proto.errors import (
    AddressInUse,
    Fenced,
    InvalidSpec,
    JobFinished,
    LeaseExpired,
    MemberDrained,
    NoServers,
    PeersUnreachable,
    RefusedError,
    RejoinError,
    RetryError,
    ShoalError,
    StateLost,
)
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

SLOT_BYTES = 1024
"""Names have at most 128 characters, so the token takes less than half of a slot."""
_NAME = "shoal-beats"
_BEATEN, _STEP, _RAN, _HEAD, _MOVED, _STATUS, _CLAIM = 0, 8, 16, 24, 32, 40, 48
_WAITS = 1
_LIFELINE = SLOT_BYTES - SIZE_BYTES
_ENDING = _LIFELINE - 8
_WORD = struct.Struct("@Q")
_HEAD_FORM = struct.Struct("=II")
_CLAIM_FORM = struct.Struct("=Idd")


class MembershipEnding(enum.IntEnum):
    """Ending of a membership. It decides if the worker is started again."""

    UNKNOWN = 0
    """Not ended, or ended for a reason in the script."""
    FENCED = 1
    """Declared lost while alive: a new process of the worker may join."""
    REFUSED = 2
    """A new process would be refused again."""
    FINISHED = 3
    """The job is over."""
    DRAINED = 4
    PASSING = 5
    """A time limit passed, or a service was unavailable: a new process may succeed."""
    COMPLETED = 6
    """The process has trained its launcher's job to the end, and has left it."""

    @classmethod
    def of(cls, error: ShoalError) -> "MembershipEnding":
        """Ending for an error. It shows if a new process of the member could join."""
        if isinstance(error, JobFinished):
            return cls.FINISHED
        if isinstance(error, MemberDrained):
            return cls.DRAINED
        if isinstance(error, Fenced | LeaseExpired):
            # The process was replaced: a new one would displace its replacement.
            return cls.REFUSED if error.details.get("replaced_by") else cls.FENCED
        if isinstance(error, RetryError | RejoinError):
            return cls.PASSING
        lasting = isinstance(error, RefusedError | StateLost)
        return cls.REFUSED if lasting and not isinstance(error, _PASSING) else cls.UNKNOWN


_PASSING = (AddressInUse, NoServers, PeersUnreachable)
"""Refusals that the environment causes: the next start may succeed."""


@dataclass(frozen=True, kw_only=True)
class SlotClaim:
    """A worker's request for heartbeats: the member, and its process."""

    pid: int
    heartbeat_s: float
    token: Token
    step: int
    status: TrainerStatus


class BeatSlot:
    """A worker's slot on the board."""

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory = memory
        self._start = index * SLOT_BYTES
        self.lifeline = Lifeline(memory, self._start + _LIFELINE)

    @classmethod
    def open(cls, address: str) -> "BeatSlot":
        """The slot at an address of `BeatBoard.address`. Raises InvalidSpec or OSError."""
        path, _, index = address.rpartition(":")
        if not path or not index.isdigit():
            raise InvalidSpec(
                "bad address of a beat slot", seen=repr(address), expected="PATH:NUMBER"
            )
        # The path may be another file, on another host or after the launcher's end: do not write to
        # it.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = Path(f"/proc/self/fd/{descriptor}").readlink().name
            if not found.startswith(f"memfd:{_NAME}"):
                raise InvalidSpec("not a board of beats", seen=found, expected=f"memfd:{_NAME}")
            memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        if (int(index) + 1) * SLOT_BYTES > len(memory):
            raise InvalidSpec(
                "no such beat slot",
                seen=index,
                expected=f"below {len(memory) // SLOT_BYTES}",
            )
        return cls(memory, int(index))

    # --- the worker ---

    def claim(self, token: Token, *, heartbeat_s: float, patience_s: float) -> None:
        """Ask the launcher to send heartbeats for this process, as the member in the token. If
        `record_running` is not called for `patience_s`, the process counts as hung, and the
        heartbeats end.
        """
        self._put(_BEATEN, 0)
        self._put(_ENDING, MembershipEnding.UNKNOWN)
        self.record_running()
        claim = _CLAIM_FORM.pack(os.getpid(), heartbeat_s, patience_s) + token.SerializeToString()
        if _CLAIM + len(claim) > _ENDING:
            return  # longer than any admitted name: this member sends its own heartbeats
        # The checksum shows a half-written claim.
        self._memory[self._start + _CLAIM : self._start + _CLAIM + len(claim)] = claim
        self._put_head(_HEAD_FORM.pack(len(claim), zlib.crc32(claim)))

    def withdraw(self) -> None:
        """End heartbeats and the lifeline: the membership is over."""
        self.lifeline.release()
        self.unclaim()

    def unclaim(self) -> None:
        """End heartbeats; the lifeline still shows the end of the process."""
        self._put_head(_HEAD_FORM.pack(0, 0))

    def end(self, ending: MembershipEnding, *, by_script: bool = False) -> None:
        """Set how the membership ended.

        COMPLETED replaces any ending. Other endings replace UNKNOWN, FENCED and COMPLETED: after a
        completed job, the next job of the script may refuse the process. With `by_script`, for an
        error of the script, they replace FINISHED, too: the job is over, but the script's work
        after it has failed."""
        replaced = {MembershipEnding.UNKNOWN, MembershipEnding.FENCED, MembershipEnding.COMPLETED}
        if by_script:
            replaced.add(MembershipEnding.FINISHED)
        if ending is MembershipEnding.COMPLETED or (
            ending is not MembershipEnding.UNKNOWN and self.ending in replaced
        ):
            self._put(_ENDING, ending)

    def record_running(self) -> None:
        """Record that a thread of this process has run, so that no other one keeps the GIL."""
        self._put(_RAN, time.monotonic_ns())

    def progress(self, step: int) -> None:
        """Set the number of steps committed so far, for the next heartbeat."""
        self._put(_STEP, step)

    def report_status(self, status: TrainerStatus) -> None:
        """Set the trainer's activity, for the next heartbeat."""
        self._put(_MOVED, status.moved)
        since = (status.own_code_since_ns & ~1) | int(status.loads)
        self._put(_STATUS, _WAITS if status.waits else since if status.own_code_since_ns else 0)

    def has_recent_beat(self, within_s: float) -> bool:
        """True if a heartbeat of the launcher was accepted within `within_s`: the member need not
        send its own."""
        return time.monotonic_ns() - self._get(_BEATEN) < within_s * 1e9

    # --- the launcher ---

    def claimed(self, pid: int) -> SlotClaim | None:
        """Claim of process `pid`; None without a complete claim, or for a hung process."""
        claim = self.claim_of(pid)
        if claim is None:
            return None
        patience_s = _CLAIM_FORM.unpack_from(self._memory, self._start + _CLAIM)[2]
        return None if time.monotonic_ns() - self._get(_RAN) > patience_s * 1e9 else claim

    def claim_of(self, pid: int) -> SlotClaim | None:
        """Claim of process `pid`, even if the process hangs."""
        claim = self.newest_claim
        return claim if claim is not None and claim.pid == pid else None

    @property
    def newest_claim(self) -> SlotClaim | None:
        """Claim of the slot's newest process, or of a child of it, which the launcher does not
        watch."""
        start = self._start
        length, checksum = _HEAD_FORM.unpack(self._memory[start + _HEAD : start + _MOVED])
        claim = self._memory[start + _CLAIM : start + min(_CLAIM + length, _ENDING)]
        if length <= _CLAIM_FORM.size or zlib.crc32(claim) != checksum:
            return None
        pid, heartbeat_s, _ = _CLAIM_FORM.unpack_from(claim)
        try:
            token = Token.FromString(claim[_CLAIM_FORM.size :])
        except DecodeError:
            return None
        status = self._get(_STATUS)
        return SlotClaim(
            pid=pid,
            heartbeat_s=heartbeat_s,
            token=token,
            step=self._get(_STEP),
            status=TrainerStatus(
                moved=self._get(_MOVED),
                waits=status == _WAITS,
                own_code_since_ns=status if status > _WAITS else 0,
                loads=status > _WAITS and bool(status & 1),
            ),
        )

    def record_accepted_heartbeat(self, claim: SlotClaim) -> None:
        """Record an accepted heartbeat, if the slot still has this claim."""
        now = self.claimed(claim.pid)
        if now is not None and now.token.incarnation == claim.token.incarnation:
            self._put(_BEATEN, time.monotonic_ns())

    def record_refused_heartbeat(self, claim: SlotClaim, error: ShoalError) -> None:
        """Record a refused heartbeat, if the slot still has this claim."""
        now = self.claimed(claim.pid)
        if isinstance(error, RetryError):
            return  # the next heartbeat may be accepted: the membership has not ended
        if now is not None and now.token.incarnation == claim.token.incarnation:
            self.end(MembershipEnding.of(error))

    @property
    def has_left(self) -> bool:
        """True if the slot's newest process, or a child of it, was a member and left."""
        return bool(self._claimant) and self.newest_claim is None

    @property
    def _claimant(self) -> int:
        pid: int = _CLAIM_FORM.unpack_from(self._memory, self._start + _CLAIM)[0]
        return pid

    @property
    def ending(self) -> MembershipEnding:
        """Ending of the membership of the slot's newest process."""
        return MembershipEnding(self._get(_ENDING))

    @property
    def was_claimed(self) -> bool:
        """True if the slot's newest process, or a child of it, is or was a member, or was refused
        as one."""
        return self.ending is not MembershipEnding.UNKNOWN or bool(self._claimant)

    def clear(self) -> None:
        """Clear the slot once its process is gone."""
        self._memory[self._start : self._start + _LIFELINE] = bytes(_LIFELINE)
        self.lifeline.prepare()

    def _put_head(self, head: bytes) -> None:
        self._memory[self._start + _HEAD : self._start + _MOVED] = head

    def _put(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._memory, self._start + offset, value)

    def _get(self, offset: int) -> int:
        value: int = _WORD.unpack_from(self._memory, self._start + offset)[0]
        return value


class BeatBoard:
    """The slots of one launcher's workers."""

    def __init__(self, num_slots: int) -> None:
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_slots * SLOT_BYTES)
        self._memory = mmap.mmap(self._descriptor, 0)
        self.slots = [BeatSlot(self._memory, index) for index in range(num_slots)]
        for slot in self.slots:
            slot.clear()

    def __enter__(self) -> "BeatBoard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The memory is unmapped with its last reference. The ExitWatch of a hung process has one.
        os.close(self._descriptor)

    def address(self, index: int) -> str:
        """Address at which a process of the same user opens the slot."""
        # Unlike an inherited descriptor, this works in a child of the script.
        return f"/proc/{os.getpid()}/fd/{self._descriptor}:{index}"


def beat_of(token: Token, step: int, status: TrainerStatus) -> pb.Beat:
    """A member's heartbeat, as of now."""
    return pb.Beat(
        token=token,
        step=step,
        moved=status.moved,
        waits=status.waits,
        own_code_s=status.own_code_s,
        loads=status.loads,
    )
