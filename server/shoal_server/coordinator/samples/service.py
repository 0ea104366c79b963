"""The Samples service: a ledger a job, answered from memory and written behind.

The books live in memory; etcd gets a copy at most four times a second and one at the end. So a
coordinator's death can cost what was leased and completed since the last copy, a quarter of a
second of it: its successor leases those samples again. They are repeated, never lost, for a copy
never says that a sample was completed which was not. What the successor's books still hold for a
member that is gone, or that works at something else by now, goes back by itself: members that are
not in etcd lose theirs when the books are opened, the others with their next request, in which
they name what they hold.

A copy is written only over the one that was read or written before it. A coordinator that was
deposed thus fails to write, closes the books, and reads them anew if it is ever asked again.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import structlog

from shoal_proto.errors import (
    Fenced,
    ProposalConflict,
    RetryError,
    ShoalError,
)
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import samples_pb2, samples_pb2_grpc
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.persistence.stored_json import set_aside
from shoal_server.coordinator.samples import messages as sample_messages
from shoal_server.core.samples.ledger import Ledger
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore, Put, Revision, unchanged_since
from shoal_server.etcd.json_fields import Fields, Unreadable, taken_apart
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

Authorize = Callable[[Token], Awaitable[None]]

WRITE_INTERVAL_S = 0.25
HAND_OVER_WITHIN_S = 1.0
MAX_BOOKS = 256
MAX_LOSSES = 4096


class _Book:
    """One job's ledger, and how far the copy in etcd is behind it."""

    def __init__(self, ledger: Ledger, revision: Revision, *, changed: bool) -> None:
        self.ledger = ledger
        self.revision = revision
        """Of the newest copy: 0 when there is none."""
        self.changed = changed


class SamplesService(samples_pb2_grpc.SamplesServicer):
    """Leases samples to members for as long as `async with` lasts.

    `authorize` raises for a token that may not speak: Fenced, UnknownJob, NotLeader ... It is asked
    on each call. The newest 256 jobs are kept open.
    """

    def __init__(
        self,
        store: KeyValueStore,
        authorize: Authorize,
        *,
        write_interval_s: float = WRITE_INTERVAL_S,
    ) -> None:
        self._store = store
        self._authorize = authorize
        self._write_interval_s = write_interval_s
        self._books: OrderedDict[str, _Book] = OrderedDict()
        self._opening = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._losses: OrderedDict[tuple[str, str, str], int] = OrderedDict()
        self._num_losses = 0
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._store_is_away = False

    async def __aenter__(self) -> "SamplesService":
        self._writer = asyncio.create_task(self._write_behind(), name="samples-writer")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._writer is not None
        # Not cancelled: a write cut off half-way may or may not have happened.
        self._stopping.set()
        self._changed.set()
        await self._writer
        await self._write_all()

    def member_lost(self, job: str, member_id: str, incarnation: str) -> None:
        """What this incarnation holds goes back, and it gets nothing more. Lost or left."""
        self._num_losses += 1
        self._losses[job, member_id, incarnation] = self._num_losses
        if len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)
        book = self._books.get(job)
        if book is None:
            return  # the loss is remembered for when the books are opened
        num_samples = book.ledger.give_back(member_id, public_id(incarnation))
        self._note_change(book)
        if num_samples:
            log.info("samples_returned", job=job, member=member_id, num_samples=num_samples)

    def summary(self, job: str) -> LedgerCounts | None:
        """The books in numbers; None for a job that has none open here."""
        book = self._books.get(job)
        return book.ledger.counts() if book else None

    async def open_existing(self, job: str) -> None:
        """Open the books of a job that has some, so that `summary` knows them after a fail-over.

        Only while there is room; books of further jobs are opened when somebody asks for samples.
        Raises Unavailable when etcd is away, JobSetAside for books that cannot be read.
        """
        async with self._opening:
            if job not in self._books and len(self._books) < MAX_BOOKS // 2:
                found = await self._read(job)
                if found is not None:
                    self._keep(job, found)

    def books(self, job: str) -> Mapping[str, Any] | None:
        """The job's books as of now, as JSON types; None for a job that has none open here."""
        book = self._books.get(job)
        return book.ledger.to_json() if book else None

    def close_replaced(self, job: str) -> None:
        """Forget a job's books: others were written in their place."""
        self._books.pop(job, None)

    @asynccontextmanager
    async def closed(self, job: str) -> AsyncIterator[None]:
        """Without books of the job in the block, and with no write of them under way."""
        async with self._opening, self._writing:
            self._books.pop(job, None)
            yield

    async def hand_over(self) -> None:
        """Write what is not written yet and forget all books: call it when stepping down.

        Where another coordinator leads already the write fails by itself and nothing is harmed.
        """
        try:
            async with asyncio.timeout(HAND_OVER_WITHIN_S):
                await self._write_all()
        except TimeoutError:
            log.warning("ledgers_not_handed_over", reason="etcd did not answer in time")
        self._books.clear()

    async def Lease(
        self, request: samples_pb2.LeaseRequest, context: Context
    ) -> samples_pb2.LeaseReply:
        token = request.token
        sample_messages.check(request)
        num_losses = self._num_losses
        await self._authorize_or_count(request)
        book = await self._book(token.job, request.dataset_size, request.num_epochs)
        if self._losses.get((token.job, token.member_id, token.incarnation), 0) > num_losses:
            # It was lost while this call waited: a range leased now would never come back.
            book.ledger.ignore(sample_messages.ranges_of(request.completed))
            raise Fenced(
                f"{token.member_id} was declared lost",
                seen=f"process {public_id(token.incarnation)}",
            )
        reply = sample_messages.answer(book.ledger, request)
        self._note_change(book)
        return reply

    async def _authorize_or_count(self, request: samples_pb2.LeaseRequest) -> None:
        try:
            await self._authorize(request.token)
        except Fenced:
            book = self._books.get(request.token.job)
            if book is not None and request.completed:
                book.ledger.ignore(sample_messages.ranges_of(request.completed))
                self._note_change(book)
            raise

    async def _book(self, job: str, dataset_size: int, num_epochs: int) -> _Book:
        """The job's books: open, read from etcd, or begun. Raises ProposalConflict."""
        book = self._books.get(job)
        if book is None:
            async with self._opening:
                book = self._books.get(job) or await self._read(job)
                if book is None:
                    ledger = Ledger(dataset_size=dataset_size, num_epochs=num_epochs)
                    book = _Book(ledger, Revision(0), changed=True)
                    log.info("ledger_begun", job=job, num_samples=dataset_size, epochs=num_epochs)
                self._keep(job, book)
        self._books.move_to_end(job)
        has = (book.ledger.dataset_size, book.ledger.num_epochs)
        asked = (dataset_size, num_epochs)
        if asked != has:
            raise ProposalConflict(
                f"job {job} goes over other samples",
                seen=f"dataset_size {asked[0]}, num_epochs {asked[1]}",
                expected=f"dataset_size {has[0]}, num_epochs {has[1]}",
                fix="Give every member of the job the same dataset and number of epochs.",
                details={"dataset_size": str(has[0]), "num_epochs": str(has[1])},
            )
        return book

    def _keep(self, job: str, book: _Book) -> None:
        self._books[job] = book
        if len(self._books) > MAX_BOOKS:
            written = [name for name, kept in self._books.items() if not kept.changed]
            if written and written[0] != job:
                del self._books[written[0]]

    async def _read(self, job: str) -> _Book | None:
        entry = await self._store.get(keys.sample_ledger(job))
        if entry is None:
            return None
        try:
            with taken_apart():
                ledger = Ledger.from_json(json.loads(entry.value))
        except Unreadable as error:
            raise set_aside(job, entry.key, error) from error
        living = await self._living(job)
        num_samples = sum(
            ledger.give_back(member_id, incarnation)
            for member_id, incarnation in ledger.holders
            if (member_id, incarnation) not in living
        )
        log.info("ledger_opened", job=job, num_returned_samples=num_samples)
        return _Book(ledger, entry.mod_revision, changed=num_samples > 0)

    async def _living(self, job: str) -> set[tuple[str, str]]:
        prefix = keys.members(job)
        items = (await self._store.range(prefix)).items
        present = set()
        for item in items:
            try:
                incarnation = Fields.parsed(item.value).text("incarnation")
            except Unreadable as error:
                raise set_aside(job, item.key, error) from error
            present.add((item.key.removeprefix(prefix), public_id(incarnation)))
        return {who for who in present if (job, *who) not in self._losses}

    def _note_change(self, book: _Book) -> None:
        book.changed = True
        self._changed.set()

    async def _write_behind(self) -> None:
        while not self._stopping.is_set():
            await self._changed.wait()
            self._changed.clear()
            await self._write_all()
            try:
                # This is what keeps it to a few writes a second.
                await asyncio.wait_for(self._stopping.wait(), self._write_interval_s)
            except TimeoutError:
                continue

    async def _write_all(self) -> None:
        async with self._writing:
            for job, book in [(job, book) for job, book in self._books.items() if book.changed]:
                try:
                    await self._write(job, book)
                except ShoalError as error:
                    self._write_failed(job, book, error)

    async def _write(self, job: str, book: _Book) -> None:
        key = keys.sample_ledger(job)
        value = json.dumps(book.ledger.to_json(), separators=(",", ":")).encode()
        book.changed = False
        try:
            result = await self._store.transact(
                [unchanged_since(key, book.revision)], [Put(key, value)]
            )
            succeeded, revision = result.succeeded, result.revision
        except RetryError as error:
            if error.details.get("outcome") != "unknown":
                raise
            entry = await self._store.get(key)
            revision = entry.mod_revision if entry else Revision(0)
            succeeded = entry is not None and entry.value == value
            if not succeeded and revision == book.revision:
                raise  # it did not take effect: the next round tries again
        if not succeeded:
            log.warning("ledger_taken_over", job=job, reason="another coordinator wrote it")
            if self._books.get(job) is book:
                del self._books[job]
            return
        book.revision = revision
        if self._store_is_away:
            self._store_is_away = False
            log.info("ledger_writes_resumed", job=job)

    def _write_failed(self, job: str, book: _Book, error: ShoalError) -> None:
        self._note_change(book)
        if not self._store_is_away:
            self._store_is_away = True
            log.warning("ledger_not_written", job=job, reason=str(error))
