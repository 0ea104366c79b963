"""Writes of a job compare the revision of its record: they fail if it is not the one known."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clusters.coordinator_world import jobs_in, served
from support.clusters.hooked_store import HookedStore, Transaction, answer_lost
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import (
    DeadlineExceeded,
    InternalError,
    JobQuarantined,
    NotLeader,
    Unavailable,
)
from shoal_server.coordinator.persistence.durable import MAX_TRANSACTION
from shoal_server.coordinator.persistence.stored_generations import StoredGenerations
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.core.driver.job_write import JobWrite, StateRecord
from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Operation, Put, TransactionResult, absent

KEY = keys.job_state("j")


class UnknownOutcomes(MemoryStore):
    """Store that answers its first transaction as one of unknown outcome."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__()
        self._arrives = arrives
        self.late: list[tuple[Sequence[Compare], Sequence[Operation]]] = []
        """Transactions that may still arrive later."""

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        if not self.late:
            self.late.append((compares, then))
            if self._arrives:
                await super().transact(compares, then)
            raise DeadlineExceeded("no answer", details={"outcome": "unknown"})
        return await super().transact(compares, then, otherwise)


class RestartingStore(HookedStore):
    """Store that restarts after it applied the first transaction with the job's record: that one is
    not answered, and the next is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._is_away = False
        self.was_away = False

    async def before(self, transaction: Transaction) -> None:
        if self._is_away:
            self._is_away, self.was_away = False, True
            raise Unavailable("etcd restarts")

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if not self.was_away and any(each.key == KEY for each in transaction.then):
            self._is_away = True
            raise answer_lost()


def write(generation: int) -> JobWrite:
    state = StateRecord(
        spec=JobSpec(job="j", max_members=2),
        last_generation=Generation(generation),
        finished=False,
        reason="r",
    )
    return JobWrite(job="j", members={}, state=state, record=None)


async def newest(store: MemoryStore) -> int:
    state = await StoredJobs(store).state("j")
    return state.last_generation if state is not None else 0


async def test_a_record_of_another_writer_is_not_overwritten() -> None:
    """The writer knows no record where one exists, an older record, or one that is deleted."""
    store = MemoryStore()
    jobs = jobs_in(store)
    await jobs.persist(write(1), StoredGenerations())
    await jobs.persist(write(2), StoredGenerations())
    late = jobs_in(store)
    with pytest.raises(InternalError, match=r"shoal repair j --apply"):
        await late.persist(write(7), StoredGenerations())
    late.keep("j", await StoredJobs(store).state("j"))
    await late.persist(write(8), StoredGenerations())
    with pytest.raises(InternalError, match="expected the one of revision"):
        await jobs.persist(write(3), StoredGenerations())
    assert await newest(store) == 8
    await store.delete(KEY)
    with pytest.raises(InternalError, match="saw none"):
        await late.persist(write(9), StoredGenerations())


async def test_the_next_write_succeeds_after_one_of_unknown_outcome() -> None:
    store = UnknownOutcomes(arrives=True)
    jobs = jobs_in(store)
    await jobs.persist(write(1), StoredGenerations())
    await jobs.persist(write(2), StoredGenerations())
    assert await newest(store) == 2


async def test_a_write_that_arrives_after_its_repetition_changes_nothing() -> None:
    store = UnknownOutcomes(arrives=False)
    jobs = jobs_in(store)
    await jobs.persist(write(1), StoredGenerations())
    await jobs.persist(write(2), StoredGenerations())
    compares, then = store.late[0]
    assert not (await store.transact(compares, then)).succeeded
    assert await newest(store) == 2


async def test_a_write_of_several_transactions_survives_a_restart_of_etcd() -> None:
    """The transaction with the job's record takes effect but is not answered, and etcd is away for
    a moment: the write continues, and does not begin again with the members."""
    store = RestartingStore()
    jobs = jobs_in(store)
    departed = {f"m{number}": None for number in range(2 * MAX_TRANSACTION)}
    await jobs.persist(replace(write(1), members=departed), StoredGenerations())
    assert store.was_away
    await jobs.persist(write(2), StoredGenerations())
    assert await newest(store) == 2


async def test_a_coordinator_that_does_not_lead_gets_not_leader_for_a_changed_record() -> None:
    store = MemoryStore()
    jobs = jobs_in(store, absent(keys.LEADER))
    await store.put(keys.LEADER, b"another")
    await store.put(KEY, b"another's")
    with pytest.raises(NotLeader):
        await jobs.persist(write(1), StoredGenerations())


async def test_only_the_job_whose_record_was_changed_is_quarantined() -> None:
    """The job continues from the changed record once it is taken up again."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        item = await store.get(KEY)
        assert item is not None
        await store.transact((), [Put(KEY, item.value)])
        with pytest.raises(JobQuarantined, match="is not the one that its last coordinator wrote"):
            await asyncio.to_thread(world.client("b", desired=1).join)
        assert not world.coordinator.term.deposed.is_set()
        assert await world.coordinator.registry.resume_quarantined("j") is not None
        assert not a.is_broken(1)
        await world.joined("c", desired=1)
