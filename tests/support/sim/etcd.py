"""etcd in virtual time: real transactions on real records, with latency and outages."""

import asyncio
import atexit
import json
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from support.clusters.memory_store import MemoryStore
from support.sim.coroutines import result_of
from support.sim.releases import MARK, Release, written
from support.sim.virtual_time import Clock, Process, Steps, Wait

from shoal_proto.errors import Unavailable
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_generations import (
    StoredGenerations,
    stored_record,
)
from shoal_server.coordinator.persistence.stored_jobs import StoredJob, StoredJobs
from shoal_server.core.generations.roster import Generation, GenerationRecord, JobSpec
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    Operation,
    Put,
    TransactionResult,
    created_at,
)

LATENCY_S = 0.02
LOST_ANSWERS = 0.01
"""Fraction of writes whose answer is lost."""

T = TypeVar("T")


class _Until:
    """Awaitable by which a coroutine waits in a simulated thread."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __await__(self) -> Generator[Wait, bool, bool]:
        return (yield self._wait)


def awaited(work: Coroutine[Any, Any, T]) -> Steps[T]:
    """Run a coroutine of the real code as a part of a simulated thread."""
    return (yield from work.__await__())


class SimEtcd:
    """etcd of a simulation, to which the real persistence code writes, and which the test
    inspects."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memory = MemoryStore(clock=lambda: clock.now_s)
        self._elections = 0
        self.leader: object | None = None
        """The holder of the leader's key."""
        self.back_s = 0.0
        self.loses_answers = True
        self.records: dict[Generation, list[GenerationRecord]] = {}
        """All records written, by generation; the last of each is the current one."""
        self.was_marked = False
        """True if the next release has written the job's own record."""
        self.on_write: Callable[[GenerationRecord], None] = lambda record: None

    # --- the leader ---

    def elect(self, leader: object) -> Sequence[Compare]:
        """Give the leader's key to another leader. Returns the fence for its transactions."""
        self.depose()
        self._elections, self.leader = self._elections + 1, leader
        put = Put(keys.LEADER, str(self._elections).encode())
        return (created_at(keys.LEADER, result_of(self._memory.transact((), (put,))).revision),)

    def depose(self) -> None:
        self.leader = None
        result_of(self._memory.transact((), (Delete(keys.LEADER),)))

    # --- calls of a leader ---

    def connected(self, process: Process, release: Release) -> "SimConnection":
        """Return the store for one coordinator's process."""
        return SimConnection(self, process, release)

    def away_s(self) -> float:
        """Draw the time until a call made now is answered."""
        return max(self.back_s - self._clock.now_s, 0.0) + self._clock.random.random() * LATENCY_S

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        process: Process,
    ) -> TransactionResult:
        """Execute a transaction. Raises Unavailable if the answer is lost: the outcome is
        unknown."""
        clock, answers = self._clock, list[TransactionResult]()
        lost = self.loses_answers and clock.random.random() < LOST_ANSWERS
        is_answered = False

        def apply() -> None:
            if clock.now_s < self.back_s:
                clock.later(self.away_s(), apply)
                return
            answers.append(result_of(self._memory.transact(compares, then, otherwise)))
            if answers[0].succeeded:
                self._note(then)
            # The write is durable even if the leader has died before the answer.
            clock.soon(receive_answer, LATENCY_S)

        def receive_answer() -> None:
            nonlocal is_answered
            is_answered = True
            process.changed()

        clock.later(self.away_s(), apply)
        await _Until(Wait(lambda: is_answered))
        if lost:
            raise Unavailable("the connection broke", details={"outcome": "unknown"})
        return answers[0]

    def _note(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Put) and operation.key.endswith("/state"):
                self.was_marked |= MARK.items() <= json.loads(operation.value).items()
            if isinstance(operation, Put) and "/generations/" in operation.key:
                record = self._record(operation)
                written = self.records.setdefault(record.roster.generation, [])
                # A write whose outcome is unknown is repeated.
                if not written or written[-1] != record:
                    written.append(record)
                    self.on_write(record)

    @staticmethod
    def _record(operation: Put) -> GenerationRecord:
        job = operation.key.removeprefix(keys.JOBS).partition("/")[0]
        number = keys.generation_number(job, operation.key)
        assert number is not None
        return stored_record(job, number, operation.value)

    def load(self, spec: JobSpec) -> StoredJob | None:
        """Load the job as it is now; None if there is none."""
        return _event_loop().run_until_complete(self._load(spec.job))

    async def _load(self, job: str) -> StoredJob | None:
        jobs = StoredJobs(self._memory)
        survey = await jobs.survey()
        assert not survey.quarantined, survey.quarantined
        state = survey.states.get(job)
        if state is None:
            assert not survey.strays, survey.strays
            return None
        if state.finished:
            return StoredJob(state=state, records=(), members={}, generations=StoredGenerations())
        return await jobs.load(state)

    # --- inspection by tests ---

    def written(self, record: GenerationRecord) -> Sequence[GenerationRecord]:
        """Return all records written for the record's generation."""
        return self.records.get(record.roster.generation, ())

    def state(self, job: str) -> Mapping[str, object]:
        """Return all fields of the job's own record."""
        item = result_of(self._memory.get(keys.job_state(job)))
        return dict(json.loads(item.value)) if item is not None else {}

    def incarnation_of(self, job: str, member_id: str) -> str:
        """Return the durable incarnation of the member; empty if there is no such member."""
        item = result_of(self._memory.get(keys.member(job, member_id)))
        return codec.member_from_json(item.value)[0] if item is not None else ""


@dataclass(frozen=True)
class SimConnection:
    """The part of a `Keyspace` that writes, for one process."""

    etcd: SimEtcd
    process: Process
    release: Release

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        writes = written(then, self.release)
        return await self.etcd.transact(compares, writes, otherwise, self.process)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for real code that reads many keys at once; no time passes in it."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop
