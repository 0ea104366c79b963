"""The Samples service: one ledger for each job, kept in memory and copied to etcd.

Each ledger is written at most four times a second, mostly as deltas (`stored_ledger`). A member
with a reserve gets a range only once its lease is in etcd, and repeats its reports until etcd has
them: the leader's death costs it no progress. A member without a reserve is answered from memory:
samples that it completed since the last write may be leased again after the leader's death. No
sample is ever skipped.

When a ledger is opened, members that are not in etcd lose their leases. The others' leases are
corrected by their next requests, which name their ranges. Each write is conditional on the last
known record: a ledger whose record has changed is closed, and read again by a later call.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

import structlog

from shoal_proto.errors import (
    AccessDenied,
    Fenced,
    NotLeader,
    ProposalConflict,
    RetryError,
    ShoalError,
)
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import samples_pb2, samples_pb2_grpc
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.persistence.quarantine import unreadable
from shoal_server.coordinator.samples import messages as sample_messages
from shoal_server.coordinator.samples.stored_ledger import StoredLedger
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

Authorize = Callable[[Token], Awaitable[None]]

WRITE_INTERVAL_S = 0.25
MAX_WRITES_A_SECOND = 32
"""Limit for all jobs: etcd then grows by less than 100 MB an hour with 30 jobs of 50 members."""
HAND_OVER_WITHIN_S = 1.0
MAX_OPEN = 256
MAX_LOSSES = 4096


OnFailed = Callable[[str, Exception], object]
"""Called with a job whose ledger cannot be stored, and the error."""


def _log_failure(job: str, error: Exception) -> None:
    log.error("ledger_not_kept", job=job, error=repr(error))


class _OpenLedger:
    def __init__(self, ledger: SampleLedger, stored: StoredLedger, *, changed: bool) -> None:
        self.ledger = ledger
        self.stored = stored
        self.is_closed = False
        self.durable_sequences: Mapping[str, int] = {}
        """Sequence number of each member's newest request in etcd."""
        self.requested_s: dict[str, float] = {}
        """Last request of each member, on the loop's clock."""
        self.waiting_since: dict[str, float] = {}
        """Start of the wait of each member without samples."""
        self.num_changes = int(changed)
        self._num_written = 0
        self._moved = asyncio.Event()

    @property
    def changed(self) -> bool:
        return self.num_changes > self._num_written

    def written(self, num_changes: int, sequences: Mapping[str, int]) -> None:
        self._num_written, self.durable_sequences = num_changes, sequences
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    async def durable(self) -> None:
        """Wait until etcd has all changes so far. Raises NotLeader if this coordinator will not
        write them."""
        num_changes = self.num_changes
        while self._num_written < num_changes:
            if self.is_closed:
                raise NotLeader("this coordinator closed the ledger", details={"leader": ""})
            await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def note_wait(self, member_id: str, now_s: float) -> None:
        if self.ledger.waits(member_id):
            self.waiting_since.setdefault(member_id, now_s)
        else:
            self.waiting_since.pop(member_id, None)


class SamplesService(samples_pb2_grpc.SamplesServicer):
    """Leases samples to members during its `async with` block.

    `authorize` raises for a bad token. The ledgers of the 256 jobs used last stay open, and others
    with unwritten changes.
    """

    def __init__(
        self,
        store: LeaderStore,
        authorize: Authorize,
        num_members: Callable[[str], int] = lambda job: 1,
        *,
        clock: Callable[[], float] = time.time,
        write_interval_s: float = WRITE_INTERVAL_S,
        on_failed: OnFailed = _log_failure,
    ) -> None:
        """`num_members` returns how many members share a job's samples."""
        self._on_failed = on_failed
        self._store = store
        self._authorize = authorize
        self._num_members = num_members
        self._clock = clock
        self._write_interval_s = write_interval_s
        self._open: OrderedDict[str, _OpenLedger] = OrderedDict()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks of ledgers that are being opened, or kept closed."""
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
        # Do not cancel the writer: an interrupted write would have an unknown outcome.
        self._stopping.set()
        self._changed.set()
        await self._writer
        await self.write_all(whole=True)

    def member_lost(self, job: str, member_id: str, incarnation: str) -> None:
        """Free the samples of a process that was lost or has left. Its calls in progress get no
        further ones."""
        self._num_losses += 1
        self._losses[job, member_id, incarnation] = self._num_losses
        if len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)
        opened = self._open.get(job)
        if opened is None:
            return  # applied when the ledger is opened
        silent_s = asyncio.get_running_loop().time() - opened.requested_s.pop(member_id, -math.inf)
        num_samples = opened.ledger.give_back(member_id, public_id(incarnation), silent_s=silent_s)
        opened.note_wait(member_id, self._clock())
        self._note_change(opened)
        if num_samples:
            log.info("samples_returned", job=job, member=member_id, num_samples=num_samples)

    def summary(self, job: str) -> LedgerCounts | None:
        """Counts of a job's ledger; None if it is not open here."""
        opened = self._open.get(job)
        return opened.ledger.counts() if opened else None

    def waiting(self, job: str) -> Mapping[str, tuple[str, float]]:
        """Members without samples: the reason, and the start of the wait."""
        opened = self._open.get(job)
        if opened is None or not opened.waiting_since:
            return {}
        reason = sample_messages.wait_in_words(opened.ledger)
        return {name: (reason, since_s) for name, since_s in opened.waiting_since.items()}

    async def open_existing(self, job: str) -> None:
        """Open the ledger of a job, if there is one, so that `summary` has it after a leader
        failover.

        Opens about MAX_OPEN / 2; requests open the others. Raises Unavailable while etcd cannot be
        reached, JobQuarantined for an unreadable ledger.
        """
        async with self._opening_lock(job):
            if job not in self._open and len(self._open) < MAX_OPEN // 2:
                opened = await self._read(job)
                if opened is not None:
                    self._keep(job, opened)

    async def ledger_json(self, job: str) -> Mapping[str, Any] | None:
        """Current ledger of the job, as JSON types; None without one.

        Raises Unavailable if it is not open and etcd cannot be reached, JobQuarantined if it is
        unreadable.
        """
        ledger = await self._ledger(job)
        return ledger.to_json() if ledger is not None else None

    async def counts(self, job: str) -> LedgerCounts | None:
        """Counts of a job's ledger; None without one. Raises what `ledger_json` raises."""
        ledger = await self._ledger(job)
        return ledger.counts() if ledger is not None else None

    async def _ledger(self, job: str) -> SampleLedger | None:
        opened = self._open.get(job)
        if opened is None:
            async with self._opening_lock(job):
                # etcd has all changes of a ledger that is not open.
                opened = self._open.get(job) or await self._read(job)
        return opened.ledger if opened is not None else None

    def close_replaced(self, job: str) -> None:
        """Close a job's ledger, which was replaced in etcd."""
        self._close(job)

    def _close(self, job: str) -> None:
        opened = self._open.pop(job, None)
        if opened is not None:
            opened.close()

    @asynccontextmanager
    async def closed_ledger(self, job: str) -> AsyncIterator[None]:
        """Keep the job's ledger closed and unwritten during the block."""
        async with self._opening_lock(job):
            async with self._writing:
                self._close(job)
            # `_writing` is released, so that other ledgers are written.
            yield

    def _opening_lock(self, job: str) -> asyncio.Lock:
        return self._opening.setdefault(job, asyncio.Lock())

    async def hand_over(self) -> None:
        """Write all ledgers whole within HAND_OVER_WITHIN_S, and close them: the successor then
        reads one value a job.

        If another coordinator leads already, the writes fail without harm.
        """
        try:
            async with asyncio.timeout(HAND_OVER_WITHIN_S):
                await self.write_all(whole=True)
        except TimeoutError:
            log.warning("ledgers_not_handed_over", reason="etcd did not answer in time")
        for job in list(self._open):
            self._close(job)

    async def Lease(
        self, request: samples_pb2.LeaseRequest, context: Context
    ) -> samples_pb2.LeaseReply:
        token = request.token
        sample_messages.check(request)
        num_losses = self._num_losses
        await self._authorize_or_count(request)
        opened = await self._opened(token.job, request.dataset_size, request.num_epochs)
        if self._losses.get((token.job, token.member_id, token.incarnation), 0) > num_losses:
            # Lost during this call: a range leased now would never return.
            opened.ledger.ignore(sample_messages.ranges_of(request.completed))
            raise Fenced(
                f"{token.member_id} was declared lost",
                seen=f"process {public_id(token.incarnation)}",
            )
        reply, is_news = sample_messages.answer(
            opened.ledger, request, self._num_members(token.job)
        )
        opened.requested_s[token.member_id] = asyncio.get_running_loop().time()
        opened.note_wait(token.member_id, self._clock())
        if is_news:
            self._note_change(opened)
        if request.reserve_samples and (reply.HasField("range") or reply.exhausted):
            await opened.durable()
        reply.durable_sequence = opened.durable_sequences.get(token.member_id, 0)
        return reply

    async def _authorize_or_count(self, request: samples_pb2.LeaseRequest) -> None:
        try:
            await self._authorize(request.token)
        except Fenced:
            opened = self._open.get(request.token.job)
            if opened is not None and request.completed:
                opened.ledger.ignore(sample_messages.ranges_of(request.completed))
                self._note_change(opened)
            raise

    async def _opened(self, job: str, dataset_size: int, num_epochs: int) -> _OpenLedger:
        """Return the job's ledger: open, read from etcd, or new. Raises ProposalConflict for
        another dataset."""
        opened = self._open.get(job)
        if opened is None:
            async with self._opening_lock(job):
                opened = self._open.get(job) or await self._read(job)
                if opened is None:
                    ledger = SampleLedger(dataset_size=dataset_size, num_epochs=num_epochs)
                    opened = _OpenLedger(ledger, self._stored(job), changed=True)
                    log.info("ledger_begun", job=job, num_samples=dataset_size, epochs=num_epochs)
                self._keep(job, opened)
        self._open.move_to_end(job)
        expected = (opened.ledger.dataset_size, opened.ledger.num_epochs)
        if (dataset_size, num_epochs) != expected:
            raise ProposalConflict(
                f"job {job} trains on other samples",
                seen=f"dataset_size {dataset_size}, num_epochs {num_epochs}",
                expected=f"dataset_size {expected[0]}, num_epochs {expected[1]}",
                fix="Give every member of the job the same dataset and number of epochs. With"
                " drop_last=True dataset_size depends on the global batch size: keep both, also"
                " when the job continues.",
                details={"dataset_size": str(expected[0]), "num_epochs": str(expected[1])},
            )
        return opened

    def _keep(self, job: str, opened: _OpenLedger) -> None:
        self._open[job] = opened
        if len(self._open) > MAX_OPEN:
            written = [name for name, kept in self._open.items() if not kept.changed]
            if written and written[0] != job:
                del self._open[written[0]]

    def _stored(self, job: str) -> StoredLedger:
        return StoredLedger(self._store, job)

    async def _read(self, job: str) -> _OpenLedger | None:
        stored = self._stored(job)
        ledger = await stored.read()
        if ledger is None:
            return None
        present = await self._present(job)
        num_samples = sum(
            ledger.give_back(member_id, incarnation)
            for member_id, incarnation in ledger.holders
            if (member_id, incarnation) not in present
        )
        log.info("ledger_opened", job=job, num_returned_samples=num_samples)
        return _OpenLedger(ledger, stored, changed=num_samples > 0)

    async def _present(self, job: str) -> set[tuple[str, str]]:
        """Return ids and public incarnations of the job's members in etcd, except lost ones, which
        may still have keys."""
        prefix = keys.members(job)
        items = (await self._store.range(prefix)).items
        present = set()
        for item in items:
            try:
                incarnation = Fields.parsed(item.value).text("incarnation")
            except UnreadableRecord as error:
                raise unreadable(job, item.key, error) from error
            member_id = item.key.removeprefix(prefix)
            if (job, member_id, incarnation) not in self._losses:
                present.add((member_id, public_id(incarnation)))
        return present

    def _note_change(self, opened: _OpenLedger) -> None:
        opened.num_changes += 1
        self._changed.set()

    async def _write_behind(self) -> None:
        while not self._stopping.is_set():
            await self._changed.wait()
            self._changed.clear()
            num_written = await self.write_all()
            pause_s = max(self._write_interval_s, num_written / MAX_WRITES_A_SECOND)
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                continue

    async def write_all(self, *, whole: bool = False) -> int:
        """Write the changed ledgers; return how many were due. `whole`: also those with deltas,
        each as a base."""
        async with self._writing:
            due = [
                (job, opened)
                for job, opened in self._open.items()
                if opened.changed or (whole and not opened.stored.has_no_deltas)
            ]
            for job, opened in due:
                try:
                    await self._write(job, opened, whole=whole)
                except (RetryError, AccessDenied) as error:
                    self._write_failed(job, error)
                except Exception as error:  # noqa: BLE001 - concerns that job alone, which is quarantined
                    self._close(job)
                    self._on_failed(job, error)
            return len(due)

    async def _write(self, job: str, opened: _OpenLedger, *, whole: bool) -> None:
        num_changes, sequences = opened.num_changes, opened.ledger.sequences()
        if not await opened.stored.write(opened.ledger, whole=whole):
            log.warning("ledger_taken_over", job=job, reason="another coordinator wrote it")
            if self._open.get(job) is opened:
                del self._open[job]
            opened.close()
            return
        opened.written(num_changes, sequences)
        if self._store_is_away:
            self._store_is_away = False
            log.info("ledger_writes_resumed", job=job)

    def _write_failed(self, job: str, error: ShoalError) -> None:
        self._changed.set()
        if not self._store_is_away:
            self._store_is_away = True
            log.warning("ledger_not_written", job=job, reason=str(error))
