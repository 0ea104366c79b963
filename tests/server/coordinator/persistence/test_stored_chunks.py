"""Generations of many members in etcd: what is written to decide them, read back, and let go of."""

import pytest
from support.clusters.coordinator_world import jobs_in

from shoal_proto.errors import JobQuarantined
from shoal_proto.incarnation import new_incarnation
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.durable import operations_of
from shoal_server.coordinator.persistence.records import MAX_RECORDS
from shoal_server.coordinator.persistence.stored_chunks import KEPT_RECORDS, StoredChunks
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.core.driver.job_write import JobWrite, StateRecord
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    Record,
    Roster,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put
from shoal_server.etcd.memory import MemoryStore

NUM_MEMBERS = 1300
NAMES = [f"member-{number:05d}" for number in range(NUM_MEMBERS)]
INCARNATIONS = {name: new_incarnation() for name in NAMES}
SPEC = JobSpec(job="j", max_members=NUM_MEMBERS, desired_members=NUM_MEMBERS)


def record(number: int, names: list[str] = NAMES, verdict: Verdict = Verdict.COMMITTED) -> Record:
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
    roster = Roster(
        generation=Generation(number),
        entries=entries,
        source_member_id=names[0],
        step=Step(number),
        planned=False,
        synchronous=True,
        fields={"strategy": "ddp"},
    )
    digest = codec.digest_of(roster)
    return Record(job="j", roster=roster, verdict=verdict, reason="r", digest=digest, decided_s=1.0)


def write(decided: Record) -> JobWrite:
    state = StateRecord(
        spec=SPEC, last_generation=decided.roster.generation, finished=False, reason="r"
    )
    return JobWrite(job="j", members={}, state=state, record=decided)


async def persist(store: MemoryStore, chunks: StoredChunks, *decided: Record) -> None:
    jobs = jobs_in(store)
    for each in decided:
        jobs.keep("j", await StoredJobs(store).state("j"))
        await jobs.persist(write(each), chunks)


async def loaded(store: MemoryStore) -> tuple[list[Record], StoredChunks]:
    """As a leader finds it that takes over."""
    stored = StoredJobs(store)
    job = await stored.load((await stored.survey()).states["j"])
    return list(job.records), job.chunks


async def test_what_decides_is_small_and_names_what_was_written_before_it() -> None:
    """And the next generation writes only what is different in it."""
    store, chunks = MemoryStore(), StoredChunks()
    operations = operations_of(write(record(1)), chunks)
    *before, _, decision = operations
    assert isinstance(decision, Put)
    assert decision.key == keys.generation("j", 1)
    assert len(decision.value) < 1200
    assert all(each.key.startswith(keys.roster_chunks("j")) for each in before)
    await persist(store, chunks, record(1))
    lost = [*NAMES[:-1]]
    lost[5] = NAMES[-1]
    # Names and incarnations of the first and the last 500, and the states.
    assert len(chunks.missing(record(2, lost))) == 5


async def test_a_leader_that_takes_over_reads_the_record_that_was_decided() -> None:
    """With every incarnation, whichever leader wrote the chunks."""
    store = MemoryStore()
    await persist(store, StoredChunks(), record(1))
    found, chunks = await loaded(store)
    assert found == [record(1)]
    lost = record(2, NAMES[:-7])
    await persist(store, chunks, lost)
    assert (await loaded(store))[0] == [record(1), lost]


async def test_what_no_kept_record_names_is_deleted() -> None:
    """The newest two that were committed are kept, however many attempts failed since."""
    store, chunks = MemoryStore(), StoredChunks()
    await persist(store, chunks, record(1), record(2))
    failed = [record(3 + n, verdict=Verdict.ABORTED) for n in range(2 * KEPT_RECORDS)]
    await persist(store, chunks, *failed[:KEPT_RECORDS])
    _, chunks = await loaded(store)
    await persist(store, chunks, *failed[KEPT_RECORDS:])
    found, _ = await loaded(store)
    assert [r.roster.generation for r in found if r.verdict is Verdict.COMMITTED] == [1, 2]
    assert len(found) == KEPT_RECORDS + 2
    num_shared = 2 * -(-NUM_MEMBERS // 500)
    assert len(await store.keys(keys.roster_chunks("j"))) == num_shared + KEPT_RECORDS + 2


async def test_chunks_of_a_decision_that_never_came_go_with_the_next_one() -> None:
    """A leader died between the two."""
    store = MemoryStore()
    await persist(store, StoredChunks(), record(1))
    await jobs_in(store).apply_all(StoredChunks().missing(record(2, NAMES[9:])))
    stray = len(await store.keys(keys.roster_chunks("j")))
    _, chunks = await loaded(store)
    await persist(store, chunks, record(2))
    assert len(await store.keys(keys.roster_chunks("j"))) < stray


async def test_a_record_whose_chunk_is_gone_sets_its_own_job_aside() -> None:
    """And says which key is missing."""
    store = MemoryStore()
    await persist(store, StoredChunks(), record(1))
    missing = (await store.keys(keys.roster_chunks("j")))[0]
    await store.delete(missing)
    with pytest.raises(JobQuarantined, match="1 chunks are missing") as caught:
        await loaded(store)
    assert missing in str(caught.value)


async def test_generations_of_few_members_go_with_time() -> None:
    """The newest 100 stay, and the newest two that were committed; others that a leader finds are
    deleted with its first decision."""
    store, chunks = MemoryStore(), StoredChunks()
    few = NAMES[:2]
    first = [record(1, few), record(2, few)]
    failed = [record(3 + n, few, verdict=Verdict.ABORTED) for n in range(MAX_RECORDS + 20)]
    await persist(store, chunks, *first, *failed)
    numbers = [int(key[-12:]) for key in await store.keys(keys.generations("j"))]
    assert numbers == [1, 2, *range(23, MAX_RECORDS + 23)]
    jobs = jobs_in(store)
    late = [record(200 + n, few) for n in range(20)]
    for each in late:
        await jobs.apply_all(operations_of(write(each), StoredChunks()))
    _, chunks = await loaded(store)
    await persist(store, chunks, record(300, few))
    numbers = [int(key[-12:]) for key in await store.keys(keys.generations("j"))]
    assert numbers == [*range(44, MAX_RECORDS + 23), *range(200, 220), 300]
