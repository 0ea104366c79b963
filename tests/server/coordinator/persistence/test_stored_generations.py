"""Decided generations in etcd: written, read back, and deleted beyond a bound."""

import pytest
from support.clusters.coordinator_world import jobs_in
from support.clusters.memory_store import MemoryStore

from shoal_proto.incarnation import new_incarnation
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.durable import operations_of
from shoal_server.coordinator.persistence.records import MAX_ENTRIES, MAX_RECORDS, Records
from shoal_server.coordinator.persistence.stored_generations import StoredGenerations
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.core.driver.job_write import JobWrite, StateRecord
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.etcd import keys

NUM_MEMBERS = 1300
NAMES = [f"member-{number:05d}" for number in range(NUM_MEMBERS)]
INCARNATIONS = {name: new_incarnation() for name in NAMES}
SPEC = JobSpec(job="j", max_members=NUM_MEMBERS, desired_members=NUM_MEMBERS)


def record(
    number: int, names: list[str] = NAMES, verdict: Verdict = Verdict.COMMITTED
) -> GenerationRecord:
    entries = tuple(
        RosterEntry(
            member_id=name,
            incarnation=INCARNATIONS[name],
            rank=rank,
            host=f"host-{rank // 8}",
            address=f"10.0.{rank // 256}.{rank % 256}",
            step=Step(number),
        )
        for rank, name in enumerate(names)
    )
    roster = GenerationRoster(
        generation=Generation(number),
        entries=entries,
        source_member_id=names[0],
        step=Step(number),
        planned=False,
        synchronous=True,
        fields={"strategy": "ddp"},
    )
    digest = codec.digest_of(roster)
    return GenerationRecord(
        job="j", roster=roster, verdict=verdict, reason="r", digest=digest, decided_s=1.0
    )


def write(decided: GenerationRecord) -> JobWrite:
    state = StateRecord(
        spec=SPEC, last_generation=decided.roster.generation, finished=False, reason="r"
    )
    return JobWrite(job="j", members={}, state=state, record=decided)


async def persist(
    store: MemoryStore, generations: StoredGenerations, *decided: GenerationRecord
) -> None:
    jobs = jobs_in(store)
    for each in decided:
        jobs.keep("j", await StoredJobs(store).state("j"))
        await jobs.persist(write(each), generations)


async def loaded(store: MemoryStore) -> tuple[list[GenerationRecord], StoredGenerations]:
    """Load the job as a new leader does."""
    stored = StoredJobs(store)
    job = await stored.load((await stored.survey()).states["j"])
    return list(job.records), job.generations


async def test_a_leader_that_takes_over_reads_the_record_that_was_decided() -> None:
    """The record is read with every incarnation, for any number of members."""
    store = MemoryStore()
    await persist(store, StoredGenerations(), record(1))
    found, generations = await loaded(store)
    assert found == [record(1)]
    lost = record(2, NAMES[:-7])
    await persist(store, generations, lost)
    assert (await loaded(store))[0] == [record(1), lost]


@pytest.mark.long
async def test_fewer_generations_are_kept_if_they_have_many_members() -> None:
    """The newest two committed ones are kept, however many attempts have failed since."""
    store, generations = MemoryStore(), StoredGenerations()
    await persist(store, generations, record(1), record(2))
    most = -(-MAX_ENTRIES // NUM_MEMBERS)
    failed = [record(3 + n, verdict=Verdict.ABORTED) for n in range(2 * most)]
    await persist(store, generations, *failed[:most])
    _, generations = await loaded(store)
    await persist(store, generations, *failed[most:])
    found, _ = await loaded(store)
    assert [r.roster.generation for r in found if r.verdict is Verdict.COMMITTED] == [1, 2]
    assert len(found) == most + 2


async def test_the_newest_generations_of_few_members_are_kept() -> None:
    """The newest 100 stay, and the newest two committed ones; others that a leader reads are
    deleted with its first decision."""
    store, generations = MemoryStore(), StoredGenerations()
    few = NAMES[:2]
    first = [record(1, few), record(2, few)]
    failed = [record(3 + n, few, verdict=Verdict.ABORTED) for n in range(MAX_RECORDS + 20)]
    await persist(store, generations, *first, *failed)
    numbers = [int(key[-12:]) for key in await store.keys(keys.generations("j"))]
    assert numbers == [1, 2, *range(23, MAX_RECORDS + 23)]
    jobs = jobs_in(store)
    late = [record(200 + n, few) for n in range(20)]
    for each in late:
        await jobs.apply_all(operations_of(write(each)))
    _, generations = await loaded(store)
    await persist(store, generations, record(300, few))
    numbers = [int(key[-12:]) for key in await store.keys(keys.generations("j"))]
    assert numbers == [*range(44, MAX_RECORDS + 23), *range(200, 220), 300]


async def test_the_newest_record_stays_the_newest_once_older_ones_are_read() -> None:
    """A coordinator reads the records of a finished job later than the job."""
    every = [record(number, NAMES[:1]) for number in range(1, 4)]

    async def read() -> list[GenerationRecord]:
        return every[:2]

    records = Records(every[2:], read)
    await records.fill()
    assert [each.generation for each in records.views()] == [3, 2, 1]


def test_a_record_is_converted_once_for_all_that_show_it() -> None:
    """A page asks each second for records with thousands of members. A record that is replaced is
    converted anew."""
    records = Records([record(number, NAMES[:1]) for number in (1, 2)])
    before = list(records.views())
    records.keep(record(2, NAMES[:1], verdict=Verdict.ABORTED))
    records.keep(record(3, NAMES[:1]))
    after = list(records.views())
    assert [(each.generation, each.verdict) for each in after] == [
        (3, "committed"),
        (2, "aborted"),
        (1, "committed"),
    ]
    assert after[2] is before[1]
