"""Notices on their way to members. What many are told is encoded once."""

import asyncio
from dataclasses import dataclass, field

import structlog

from shoal_server.coordinator.persistence import codec
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import Notice, OutcomeNotice, PrepareNotice

log = structlog.get_logger(__name__)

MAX_NOTICES = 1000


@dataclass(kw_only=True)
class NoticeStream:
    """The notices on their way to one member, encoded. None ends it."""

    member_id: str
    incarnation: str
    keeps_prepare: bool = False
    """Whether the member puts back the roster of its Prepare where an Outcome has none."""
    notices: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_NOTICES))
    ended: bool = False
    _shown: str = ""
    """The digest of the roster in the newest Prepare of this very stream."""

    def put(self, notice: Notice, encoder: "Encoder") -> None:
        if self.ended:
            return
        known = isinstance(notice, OutcomeNotice) and notice.record.digest == self._shown
        try:
            self.notices.put_nowait(encoder.encoded(notice, with_roster=not known))
        except asyncio.QueueFull:
            # It attends again and is told the state as it is then.
            log.warning("stream_overflowed", member=self.member_id)
            self.end()
            return
        if self.keeps_prepare and isinstance(notice, PrepareNotice):
            self._shown = notice.digest

    def end(self) -> None:
        """Let the reader take what is queued, then stop."""
        if not self.ended:
            self.ended = True
            if self.notices.full():
                self.notices.get_nowait()
            self.notices.put_nowait(None)


class Encoder:
    """Encodes a notice at its first use; all members that are told the same share the bytes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # The core tells all members one after the other, each of them the very same object.
        self._newest: dict[bool, tuple[Notice, bytes]] = {}

    def encoded(self, notice: Notice, *, with_roster: bool) -> bytes:
        newest = self._newest.get(with_roster)
        if newest is not None and newest[0] is notice:
            return newest[1]
        generation = self._job.last_generation
        message = codec.notice_to_pb(notice, generation, with_roster=with_roster)
        data = message.SerializeToString()
        self._newest[with_roster] = (notice, data)
        return data
