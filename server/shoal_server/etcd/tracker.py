"""State of a watch: what was delivered, and what comes next.

After a compaction, the current keys take the place of lost changes.
"""

from collections.abc import Iterable

from shoal_proto.errors import InvalidSpec
from shoal_server.etcd.api import RangeResult, Revision, WatchBatch, WatchEvent


class WatchTracker:
    def __init__(self, start: Revision) -> None:
        if start < 1:
            raise InvalidSpec(
                "bad first revision of a watch", seen=str(start), expected="1 or more"
            )
        self.next = start
        """The first revision not delivered."""

    def advance(self, events: Iterable[WatchEvent]) -> WatchBatch | None:
        """Advance by events of whole revisions; return a batch of the new ones, or None."""
        fresh = tuple(event for event in events if event.mod_revision >= self.next)
        if not fresh:
            return None
        revision = fresh[-1].mod_revision
        self.next = Revision(revision + 1)
        return WatchBatch(revision, fresh)

    def reset(self, now: RangeResult) -> WatchBatch:
        """Advance to the current keys, and return them as a batch."""
        self.next = Revision(max(self.next, now.revision + 1))
        return WatchBatch.of_listing(now)
