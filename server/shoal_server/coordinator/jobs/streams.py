"""Notices on their way to members. What many are told is encoded once."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from shoal_proto.errors import UnknownGeneration
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.codec import RosterForm
from shoal_server.core.generations.roster import Roster
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import Notice, OutcomeNotice, PrepareNotice

log = structlog.get_logger(__name__)

MAX_NOTICES = 1000
MAX_ROSTERS = 4
"""Whose chunks are at hand: what trains, what is tried, and what a slow member still asks for."""


@dataclass(kw_only=True)
class NoticeStream:
    """The notices on their way to one member, encoded. None ends it."""

    member_id: str
    incarnation: str
    takes_chunks: bool = False
    """Whether the member gets the members of a large roster by their digests."""
    keeps_prepare: bool = False
    """Whether the member puts back the roster of its Prepare where an Outcome has none."""
    notices: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_NOTICES))
    ended: bool = False
    _shown: str = ""
    """The digest of the roster in the newest Prepare of this very stream."""

    def put(self, notice: Notice, encoder: "Encoder") -> None:
        if self.ended:
            return
        try:
            self.notices.put_nowait(encoder.encoded(notice, self._form(notice)))
        except asyncio.QueueFull:
            # It attends again and is told the state as it is then.
            log.warning("stream_overflowed", member=self.member_id)
            self.end()
            return
        if self.keeps_prepare and isinstance(notice, PrepareNotice):
            self._shown = notice.digest

    def _form(self, notice: Notice) -> RosterForm:
        if isinstance(notice, OutcomeNotice) and notice.record.digest == self._shown:
            return RosterForm.LEFT_OUT
        roster = _roster_of(notice)
        by_digest = self.takes_chunks and roster is not None and codec.is_large(roster)
        return RosterForm.HEAD if by_digest else RosterForm.WHOLE

    def end(self) -> None:
        """Let the reader take what is queued, then stop."""
        if not self.ended:
            self.ended = True
            if self.notices.full():
                self.notices.get_nowait()
            self.notices.put_nowait(None)


def _roster_of(notice: Notice) -> Roster | None:
    match notice:
        case PrepareNotice():
            return notice.roster
        case OutcomeNotice():
            return notice.record.roster
    return None


class Encoder:
    """Encodes a notice at its first use; all members that are told the same share the bytes."""

    def __init__(self, job: Job, chunks: "NamedChunks") -> None:
        """`chunks`: where those are to be had that a notice names."""
        self._job = job
        self._chunks = chunks
        # The core tells all members one after the other, each of them the very same object.
        self._newest: dict[RosterForm, tuple[Notice, bytes]] = {}

    def encoded(self, notice: Notice, form: RosterForm) -> bytes:
        newest = self._newest.get(form)
        if newest is not None and newest[0] is notice:
            return newest[1]
        if form is RosterForm.HEAD and (roster := _roster_of(notice)) is not None:
            self._chunks.name(roster)
        message = codec.notice_to_pb(notice, self._job.last_generation, form)
        data = message.SerializeToString()
        self._newest[form] = (notice, data)
        return data


class NamedChunks:
    """The chunks of a job's newest rosters, for the members that were told their digests."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._rosters: dict[int, Mapping[bytes, bytes]] = {}
        """By generation, the newest last."""
        self._answer: tuple[tuple[bytes, ...], bytes] = ((), b"")

    def name(self, roster: Roster) -> None:
        """Members are told the digests of this one."""
        self._rosters.pop(roster.generation, None)
        self._rosters[roster.generation] = codec.cut_of(roster).chunks
        while len(self._rosters) > MAX_ROSTERS:
            del self._rosters[next(iter(self._rosters))]

    def answer(self, digests: Sequence[bytes]) -> bytes:
        """An encoded RosterChunks; hosts that lack the same chunks share the bytes.

        Raises UnknownGeneration for chunks of a roster that is over.
        """
        asked = tuple(digests)
        if self._answer[0] != asked:
            reply = pb.RosterChunks(chunks=[self._chunk(each) for each in asked])
            self._answer = (asked, reply.SerializeToString())
        return self._answer[1]

    def _chunk(self, digest: bytes) -> bytes:
        for chunks in self._rosters.values():
            if (chunk := chunks.get(digest)) is not None:
                return chunk
        newest = ", ".join(map(str, self._rosters)) or "none"
        raise UnknownGeneration(
            f"job {self._job} has no chunk {digest.hex()[:16]} of a roster",
            seen=f"a digest that the rosters of generations {newest} do not name",
            expected="a digest that a notice named just now",
            fix="Attend again: notices that need an answer are sent again.",
        )
