"""State of a watch: what was delivered, and what comes next. Pure, and the same for every store.

A watch can continue from any revision as long as etcd keeps that history. After a compaction, the
only way on is to read the current keys and deliver the difference, for which the watch must know
what it has delivered. So it keeps the newest value of each key under its prefix.
"""

from collections.abc import Iterable

from shoal_proto.errors import InvalidSpec
from shoal_server.etcd.api import EventKind, KeyValue, RangeResult, Revision, WatchBatch, WatchEvent


class WatchTracker:
    """Turns what a store sends into batches that have each change exactly once."""

    def __init__(self, start: Revision) -> None:
        if start < 1:
            raise InvalidSpec(
                "bad first revision of a watch", seen=str(start), expected="1 or more"
            )
        self.next = start
        """The first revision that has not been delivered."""
        self.seeded = start == 1
        """True if the values before `start` are known."""
        self._values: dict[str, bytes] = {}

    def seed(self, items: Iterable[KeyValue]) -> None:
        """Set the values before the first revision of the watch."""
        self._values = {item.key: item.value for item in items}
        self.seeded = True

    def advance(self, events: Iterable[WatchEvent]) -> WatchBatch | None:
        """Advance by events of whole revisions; return the batch of those that are new, or None if
        all were delivered before."""
        fresh = tuple(event for event in events if event.mod_revision >= self.next)
        if not fresh:
            return None
        delivered = tuple(self._with_previous(event) for event in fresh)
        revision = delivered[-1].mod_revision
        self.next = Revision(revision + 1)
        return WatchBatch(revision, delivered)

    def reset(self, now: RangeResult) -> WatchBatch:
        """Advance to the current state; return the batch that leads to it from the state delivered
        so far."""
        present = {item.key for item in now.items}
        gone = [
            WatchEvent(EventKind.DELETE, key, b"", now.revision)
            for key in self._values
            if key not in present
        ]
        puts = [
            WatchEvent(EventKind.PUT, item.key, item.value, item.mod_revision) for item in now.items
        ]
        events = tuple(self._with_previous(event) for event in (*gone, *puts))
        self.next = Revision(max(self.next, now.revision + 1))
        self.seeded = True
        return WatchBatch(now.revision, events, reset=True)

    def _with_previous(self, event: WatchEvent) -> WatchEvent:
        # The kept value is used even if etcd sent a previous one: etcd omits compacted values.
        previous = self._values.get(event.key, b"")
        if event.kind is EventKind.DELETE:
            self._values.pop(event.key, None)
        else:
            self._values[event.key] = event.value
        return WatchEvent(event.kind, event.key, event.value, event.mod_revision, previous)
