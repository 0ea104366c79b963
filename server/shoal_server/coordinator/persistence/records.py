"""Decided generation records of a job, in memory."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence

from shoal_server.core.generations.roster import GenerationRecord, GenerationRoster
from shoal_server.status.from_core import generation_view
from shoal_server.status.views import GenerationView

MAX_RECORDS = 100
MAX_ENTRIES = 40_000
"""Roster entries in all records: some 20 MB, and 6 MB more with their views."""
MIN_RECORDS = 2


class Records:
    """The newest 100 records, by generation; fewer if they are large, but at least two."""

    def __init__(
        self,
        records: Sequence[GenerationRecord],
        read: Callable[[], Awaitable[Sequence[GenerationRecord]]] | None = None,
    ) -> None:
        """`read` reads the other records on demand, for a job that is over."""
        self._read = read
        self._records: OrderedDict[int, GenerationRecord] = OrderedDict()
        self._views: dict[int, GenerationView] = {}
        self._num_entries = 0
        for record in records:
            self.keep(record)

    async def fill(self) -> None:
        """Read the older records, once. Raises JobQuarantined, Unavailable."""
        if self._read is None:
            return
        older = await self._read()
        known = {each.roster.generation: each for each in (*older, *self._records.values())}
        self._read, self._num_entries = None, 0
        self._records.clear()
        self._views.clear()
        for _, record in sorted(known.items()):
            self.keep(record)

    def keep(self, record: GenerationRecord) -> None:
        """Add a durable record."""
        known = self._records.get(record.roster.generation)
        self._num_entries += len(record.roster.entries)
        self._num_entries -= len(known.roster.entries) if known is not None else 0
        self._records[record.roster.generation] = record
        self._views.pop(record.roster.generation, None)
        while len(self._records) > MAX_RECORDS or (
            self._num_entries > MAX_ENTRIES and len(self._records) > MIN_RECORDS
        ):
            number, oldest = self._records.popitem(last=False)
            self._views.pop(number, None)
            self._num_entries -= len(oldest.roster.entries)

    @property
    def newest_roster(self) -> GenerationRoster | None:
        """Roster of the newest record that was read; None without one."""
        return self._records[max(self._records)].roster if self._records else None

    def views(self) -> Iterator[GenerationView]:
        """Yield the views of the records, the newest generation first. Each is made once: to make
        all takes up to half a second, and pages ask each second."""
        for number, record in sorted(self._records.items(), reverse=True):
            if number not in self._views:
                self._views[number] = generation_view(record)
            yield self._views[number]
