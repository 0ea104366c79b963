"""A job's decided generations, for those who ask."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from shoal_proto.errors import UnknownGeneration
from shoal_server.core.generations.roster import Record

log = structlog.get_logger(__name__)

MAX_RECORDS = 100


class Records:
    """The newest 100, by generation; they are all in etcd."""

    def __init__(
        self,
        job: str,
        records: Sequence[Record],
        read: Callable[[], Awaitable[Sequence[Record]]] | None = None,
    ) -> None:
        """`read` gets those that were not read yet, as of a job that was over already."""
        self._job = job
        self._read = read
        self._records: OrderedDict[int, Record] = OrderedDict(
            (record.roster.generation, record) for record in records[-MAX_RECORDS:]
        )
        self._recorded = asyncio.Event()
        """Set, and replaced by another, at the next record."""

    async def fill(self) -> None:
        """Read what was not read yet. Raises JobSetAside, Unavailable."""
        if self._read is None:
            return
        for record in (await self._read())[-MAX_RECORDS:]:
            self._records.setdefault(record.roster.generation, record)
        self._read = None

    def keep(self, record: Record) -> None:
        """Show a record that is durable."""
        self._records[record.roster.generation] = record
        while len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)
        recorded, self._recorded = self._recorded, asyncio.Event()
        recorded.set()

    def values(self) -> Iterable[Record]:
        return self._records.values()

    async def get(self, generation: int, wait_s: float) -> Record:
        """The record of a generation (0: the newest), waiting up to `wait_s` for it.

        Raises UnknownGeneration, and JobSetAside where etcd holds what cannot be read.
        """
        await self.fill()
        try:
            async with asyncio.timeout(max(wait_s, 0)):
                while (record := self._found(generation)) is None and wait_s > 0:
                    await self._recorded.wait()
        except TimeoutError:
            log.info("record_awaited_in_vain", job=self._job)
        record = self._found(generation)
        if record is None:
            raise UnknownGeneration(
                f"job {self._job} has no record of generation {generation}",
                seen=str(generation),
                expected=f"a decided one, of which the newest {MAX_RECORDS} are kept at hand",
            )
        return record

    def _found(self, generation: int) -> Record | None:
        if generation:
            return self._records.get(generation)
        return next(reversed(self._records.values()), None)
