"""State of a watch: what was delivered, and what comes next. Pure; every store uses it.

A watch can continue from any revision as long as etcd keeps that history. After a compaction, the
only way on is to read and deliver the current keys.
"""

from collections.abc import Iterable

from shoal_proto.errors import InvalidSpec
from shoal_server.etcd.api import RangeResult, Revision, WatchBatch, WatchEvent


class WatchTracker:
    """Turns what a store sends into batches that have each change exactly once."""

    def __init__(self, start: Revision) -> None:
        if start < 1:
            raise InvalidSpec(
                "bad first revision of a watch", seen=str(start), expected="1 or more"
            )
        self.next = start
        """The first revision that has not been delivered."""

    def advance(self, events: Iterable[WatchEvent]) -> WatchBatch | None:
        """Advance by events of whole revisions; return the batch of those that are new, or None if
        all were delivered before."""
        fresh = tuple(event for event in events if event.mod_revision >= self.next)
        if not fresh:
            return None
        revision = fresh[-1].mod_revision
        self.next = Revision(revision + 1)
        return WatchBatch(revision, fresh)

    def reset(self, now: RangeResult) -> WatchBatch:
        """Advance to the current state; return the batch that leads to it."""
        self.next = Revision(max(self.next, now.revision + 1))
        return WatchBatch.of_listing(now)
