"""Notices queued for members, each encoded once for all of them."""

import asyncio
from dataclasses import dataclass, field

import structlog

from shoal_proto import rosters
from shoal_proto.deflated import pack
from shoal_proto.errors import UnknownGeneration
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence import codec
from shoal_server.core.generations.roster import GenerationRoster
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import Notice, OutcomeNotice, PrepareNotice

log = structlog.get_logger(__name__)

MAX_NOTICES = 1000
MAX_ROSTERS = 4
"""The running roster, the attempted one, and those that slow members still fetch."""


@dataclass(kw_only=True)
class NoticeStream:
    """Encoded notices queued for one member; None ends the stream."""

    member_id: str
    incarnation: str
    notices: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_NOTICES))
    ended: bool = False
    _shown: str = ""
    """Digest of the roster in the newest Prepare."""

    def send_notice(self, notice: Notice, encoder: "Encoder") -> None:
        if self.ended:
            return
        try:
            with_roster = not self._omits_roster(notice)
            self.notices.put_nowait(encoder.encoded(notice, with_roster=with_roster))
        except asyncio.QueueFull:
            # The member attends again, and then gets the current state.
            log.warning("stream_overflowed", member=self.member_id)
            self.end()
            return
        if isinstance(notice, PrepareNotice):
            self._shown = notice.digest

    def _omits_roster(self, notice: Notice) -> bool:
        roster_with_digest = _roster_of(notice)
        if roster_with_digest is None:
            return False
        digest, roster = roster_with_digest
        is_known = isinstance(notice, OutcomeNotice) and digest == self._shown
        return is_known or len(roster.entries) > rosters.LARGE_ENTRIES

    def end(self) -> None:
        """End the stream after the queued notices. A full queue loses its oldest notice."""
        if not self.ended:
            self.ended = True
            if self.notices.full():
                self.notices.get_nowait()
            self.notices.put_nowait(None)


def _roster_of(notice: Notice) -> tuple[str, GenerationRoster] | None:
    match notice:
        case PrepareNotice():
            return notice.digest, notice.roster
        case OutcomeNotice():
            return notice.record.digest, notice.record.roster
    return None


class Encoder:
    """Encodes a notice once for all members that get it."""

    def __init__(self, job: Job, rosters: "NewestRosters") -> None:
        """`rosters`: keeps rosters that notices leave out."""
        self._job = job
        self._rosters = rosters
        # The core passes the same object for all members in turn.
        self._newest: dict[bool, tuple[Notice, bytes]] = {}

    def encoded(self, notice: Notice, *, with_roster: bool) -> bytes:
        newest = self._newest.get(with_roster)
        if newest is not None and newest[0] is notice:
            return newest[1]
        if not with_roster and (omitted := _roster_of(notice)) is not None:
            self._rosters.keep(*omitted)
        generation = self._job.last_generation
        message = codec.notice_to_pb(notice, generation, with_roster=with_roster)
        data = message.SerializeToString()
        self._newest[with_roster] = (notice, data)
        return data


class NewestRosters:
    """Newest rosters of a job by digest."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._rosters: dict[str, GenerationRoster] = {}
        """Ordered, the newest last."""
        self._answers: dict[str, bytes] = {}

    def keep(self, digest: str, roster: GenerationRoster) -> None:
        self._rosters.pop(digest, None)
        self._rosters[digest] = roster
        while len(self._rosters) > MAX_ROSTERS:
            oldest = next(iter(self._rosters))
            del self._rosters[oldest]
            self._answers.pop(oldest, None)

    def answer(self, digest: str) -> bytes:
        """The roster with this digest, as an encoded PackedRoster. Raises UnknownGeneration if it
        is not kept."""
        if digest not in self._answers:
            if digest not in self._rosters:
                raise self._unknown(digest)
            packed = pack(codec.roster_to_pb(self._rosters[digest]))
            self._answers[digest] = pb.PackedRoster(roster=packed).SerializeToString()
        return self._answers[digest]

    def _unknown(self, digest: str) -> UnknownGeneration:
        newest = ", ".join(str(each.generation) for each in self._rosters.values()) or "none"
        return UnknownGeneration(
            f"job {self._job} has no roster {digest[:16]}",
            seen=f"a digest that no kept roster has (kept: generations {newest})",
            expected="the digest in the newest notice",
            fix="Attend again: notices that need an answer are sent again.",
        )
