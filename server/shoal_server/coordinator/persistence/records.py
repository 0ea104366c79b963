"""Decided generation records of a job, in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog

from shoal_proto.errors import UnknownGeneration
from shoal_server.core.generations.roster import GenerationRecord
from shoal_server.status.from_core import generation_view
from shoal_server.status.views import GenerationView

log = structlog.get_logger(__name__)

MAX_RECORDS = 100
MAX_ENTRIES = 40_000
"""Roster entries in all records: some 20 MB, and 6 MB more with their views."""
MIN_RECORDS = 2


class Records:
    """The newest 100 records, by generation; fewer if they are large, but at least two."""

    def __init__(
        self,
        job: str,
        records: Sequence[GenerationRecord],
        read: Callable[[], Awaitable[Sequence[GenerationRecord]]] | None = None,
    ) -> None:
        """`read` reads the other records on demand, for a job that is over."""
        self._job = job
        self._read = read
        self._records: OrderedDict[int, GenerationRecord] = OrderedDict()
        self._views: dict[int, GenerationView] = {}
        self._num_entries = 0
        for record in records:
            self._put(record)
        self._recorded = asyncio.Event()
        """Set, and replaced, at the next record."""

    async def fill(self) -> None:
        """Read the other records, once. Raises JobQuarantined, Unavailable."""
        if self._read is None:
            return
        older = await self._read()
        known = {each.roster.generation: each for each in (*older, *self._records.values())}
        self._read, self._num_entries = None, 0
        self._records.clear()
        self._views.clear()
        for _, record in sorted(known.items()):
            self._put(record)

    def keep(self, record: GenerationRecord) -> None:
        """Add a durable record, and wake its waiting calls."""
        self._put(record)
        recorded, self._recorded = self._recorded, asyncio.Event()
        recorded.set()

    def _put(self, record: GenerationRecord) -> None:
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

    def views(self) -> Iterator[GenerationView]:
        """Yield the views of the records, the newest generation first. Each is made once: to make
        all takes up to half a second, and pages ask each second."""
        for number, record in sorted(self._records.items(), reverse=True):
            if number not in self._views:
                self._views[number] = generation_view(record)
            yield self._views[number]

    async def get(self, generation: int, wait_s: float) -> GenerationRecord:
        """Record of a generation (0: the newest); waits for it for up to `wait_s`.

        Raises UnknownGeneration if it is not kept, and what `fill` raises.
        """
        await self.fill()
        try:
            async with asyncio.timeout(max(wait_s, 0)):
                while (record := self._found(generation)) is None and wait_s > 0:
                    await self._recorded.wait()
        except TimeoutError:
            log.info("record_not_received", job=self._job)
        record = self._found(generation)
        if record is None:
            raise UnknownGeneration(
                f"job {self._job} has no record of generation {generation}",
                seen=str(generation),
                expected=f"a decided generation, one of the newest {MAX_RECORDS}",
            )
        return record

    def _found(self, generation: int) -> GenerationRecord | None:
        if generation:
            return self._records.get(generation)
        return next(reversed(self._records.values()), None)
