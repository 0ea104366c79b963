"""`shoal repair`: a job leaves its quarantine while the coordinator leads on, and its broken
records are kept under other keys."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.clusters.coordinator_world import Served, propose, served
from support.clusters.garbage import (
    Garbage,
    all_garbage,
    as_json,
    good_record,
    good_state,
)
from support.clusters.memory_store import MemoryStore
from support.processes.served_process import awaited

from shoal_client.commands.repair import report_lines
from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import InvalidSpec, JobQuarantined, UnknownJob
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.repair_pb2 import RepairReply, RepairRequest
from shoal_proto.v1.repair_pb2_grpc import RepairsStub
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.repair.state_repair import repaired_state
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress, JobResult, LifetimeFigures
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    JobSpec,
    Step,
    Verdict,
)
from shoal_server.core.publications.records import Publisher, SeriesHead
from shoal_server.etcd import keys
from shoal_server.etcd.api import RangeResult
from shoal_server.etcd.records.series import encode_head

FATAL = [each for each in all_garbage() if each.is_fatal]


async def ask(world: Served, job: str, *, apply: bool = False, **bounds: int) -> RepairReply:
    """Send the request of `shoal repair`."""
    request = RepairRequest(job=job, apply=apply, **bounds)

    def call() -> RepairReply:
        coordinators = Coordinators([world.address])
        try:
            return coordinators.call(lambda c: RepairsStub(c).Repair, request, timeout_s=10.0)
        finally:
            coordinators.close()

    return await asyncio.to_thread(call)


async def standing(world: Served, job: str) -> pb.JobStanding:
    def call() -> pb.JobStanding:
        coordinators = Coordinators([world.address])
        try:
            request = pb.GetJobRequest(job=job)
            return coordinators.call(lambda c: MembershipStub(c).GetJob, request, timeout_s=10.0)
        finally:
            coordinators.close()

    return await asyncio.to_thread(call)


@pytest.mark.parametrize("bounds", [None, JobSpec(job="j", max_members=4)])
def test_a_repaired_job_keeps_its_secret(bounds: JobSpec | None) -> None:
    """Regression: a member without the secret could join once the record had been repaired."""
    state = good_state("j")
    spec = state["spec"]
    assert isinstance(spec, dict)
    state |= {"spec": spec | {"secret_digest": "d1"}, "finished": "perhaps"}
    mended = repaired_state("j", as_json(state), generations=[1], records=[], bounds=bounds)
    assert mended.spec.secret_digest == "d1"


def test_a_secret_that_cannot_be_read_becomes_that_of_the_operator() -> None:
    """Without it, workers with the secret would be refused, and callers without it accepted."""
    bounds = JobSpec(job="j", max_members=4)
    for data in (b'{"spec": {"secret_di', as_json(good_state("j") | {"spec": 7})):
        mended = repaired_state(
            "j", data, generations=[1], records=[], bounds=bounds, secret_digest="d2"
        )
        assert mended.spec.secret_digest == "d2"


def test_a_repaired_job_keeps_the_fields_of_a_later_release() -> None:
    more = {"of_a_later_release": {"says": ["more"]}}
    state = good_state("j") | {"finished": "perhaps"} | more
    mended = repaired_state("j", as_json(state), generations=[1], records=[])
    assert mended.more == more
    assert json.loads(state_to_json(mended))["of_a_later_release"] == {"says": ["more"]}


def test_a_repaired_job_had_reached_the_step_of_its_newest_generation() -> None:
    """The step is used if the job's own record has none, so that a rollback to an earlier one is
    reported. Aborted and asynchronous generations do not count, and none counts before the job has
    trained."""
    first = stored_record("j", 1, as_json(good_record("j")))

    def generation(number: int, step: int, *, synchronous: bool = True) -> GenerationRecord:
        roster = replace(
            first.roster, generation=Generation(number), step=Step(step), synchronous=synchronous
        )
        return replace(first, roster=roster)

    records = [
        replace(generation(4, 900), verdict=Verdict.ABORTED),
        generation(3, 800, synchronous=False),
        generation(2, 300),
        generation(1, 500),
    ]
    state = good_state("j") | {"trained_in": 1}

    def reached(records: Sequence[GenerationRecord], **changes: object) -> Step:
        data = as_json(state | changes)
        mended = repaired_state("j", data, generations=range(1, 5), records=records)
        return mended.progress.reached

    assert reached(records, reached_step=-1) == 300
    assert reached(records, reached_step=-1, trained_in="two") == 300
    assert reached(records, reached_step=-1, trained_in=0) == 0
    assert reached(records, reached_step=350) == 350
    assert reached([], reached_step=-1) == 0


@pytest.mark.parametrize("ending", [{"stopping": "an operator stopped it"}, {"failed": True}])
def test_a_repaired_job_keeps_its_ending(ending: dict[str, Any]) -> None:
    """Regression: a stopped or failed job was restored as finished, and could not be retried. Only
    fields that cannot be read are lost."""
    tally = LifetimeFigures(
        begun_s=5.0,
        num_breaks=2,
        idle_s=1.5,
        result=JobResult(step=Step(7), loss=0.5, num_samples=None),
    )
    record = StateRecord(
        spec=JobSpec(job="j", max_members=8),
        last_generation=Generation(1),
        finished=True,
        reason="",
        progress=JobProgress(trained_in=Generation(1), reached=Step(7)),
        tally=tally,
        ended_s=9.0,
        done=("a",),
        **ending,
    )
    state = json.loads(state_to_json(record))

    def mended(**changes: object) -> StateRecord:
        data = as_json(state | {"last_generation": "one"} | changes)
        return replace(repaired_state("j", data, generations=[1], records=[]), reason="")

    assert mended() == record
    assert mended(num_breaks=-1) == replace(record, tally=replace(tally, num_breaks=0))
    assert mended(result=[]) == replace(record, tally=replace(tally, result=None))
    assert mended(ended_unix_s="x", done="a") == replace(record, ended_s=0.0, done=())
    lost = mended(stopping=7, failed="perhaps")
    assert lost == replace(record, stopping="", failed=False)


@pytest.mark.long
async def test_each_broken_record_is_shown_and_moved_aside() -> None:
    """Each broken record is in a job of its own; a good job trains meanwhile."""
    store = MemoryStore()
    for garbage in FATAL:
        for key, value in garbage.entries.items():
            await store.put(key, value)
    async with served(store) as world:
        trainers = await world.training("a", "b")
        for garbage in FATAL:
            await _is_repaired(world, store, garbage)
        assert not world.coordinator.term.deposed.is_set()
        assert world.coordinator.registry.quarantined == {}
        assert not any(trainer.is_broken(1) for trainer in trainers)


async def _is_repaired(world: Served, store: MemoryStore, garbage: Garbage) -> None:
    shown = await ask(world, garbage.job)
    assert shown.quarantined and not shown.goes_on, garbage.what
    (record,) = shown.records
    assert record.key == garbage.key and record.mendable, garbage.what
    assert (
        record.seen and record.remedy and garbage.key in "\n".join(report_lines(garbage.job, shown))
    )
    before = await store.get(garbage.key)
    assert before is not None and before.value == garbage.entries[garbage.key], "only shown"
    mended = await ask(world, garbage.job, apply=True)
    assert mended.goes_on, garbage.what
    moved = await store.get(mended.records[0].moved_to)
    assert moved is not None and moved.value == before.value, "moved unchanged"
    assert (await standing(world, garbage.job)).phase == "collect", garbage.what
    again = await ask(world, garbage.job)
    assert (again.quarantined, list(again.records)) == (False, []), garbage.what


async def test_a_broken_job_record_is_replaced_by_one_with_what_can_be_read() -> None:
    """The new record states that the job trained, so that it never starts from initial values."""
    store = MemoryStore()
    async with served(store) as world:
        for member in await world.training("a", "b"):
            await asyncio.to_thread(member.close)
        item = await store.get(keys.job_state("j"))
    assert item is not None
    await store.put(item.key, item.value.replace(b'"finished": false', b'"finished": 0'))
    async with served(store) as world:
        with pytest.raises(JobQuarantined):
            await standing(world, "j")
        assert (await ask(world, "j", apply=True)).goes_on
        job = world.coordinator.registry.find("j").job
        assert job.last_generation == 1
        assert job.progress.has_trained
        assert sorted(job.members) == ["a", "b"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_broken_record_of_earlier_runs_refuses_no_process_of_a_run_that_has_begun(
    has_begun: bool,
) -> None:
    """The series was published by the run that has begun, or by an earlier one."""
    store = MemoryStore()
    head = SeriesHead(number=3, epoch=2, publisher=Publisher(generation=9))
    await store.put(keys.series_head("j/policy"), encode_head(head))
    await store.put(keys.reset("j"), b"garbage")
    if has_begun:
        await store.put(keys.job_state("j"), as_json(good_state("j") | {"last_generation": 9}))
    async with served(store) as world:
        assert (await ask(world, "j", apply=True)).goes_on
        known = world.coordinator.registry.earlier_runs.get("j")
        assert (known.last_generation if known is not None else 0) == (0 if has_begun else 9)


async def test_a_rewritten_record_has_the_generation_that_published_last() -> None:
    """Generations' records may be gone: publications of lower ones would be refused."""
    store = MemoryStore()
    head = SeriesHead(number=3, epoch=2, publisher=Publisher(generation=9))
    await store.put(keys.series_head("j/policy"), encode_head(head))
    damaged = {"last_generation": "nine", "trained_in": "nine"}
    await store.put(keys.job_state("j"), as_json(good_state("j") | damaged))
    async with served(store) as world:
        assert (await ask(world, "j", apply=True)).goes_on
        job = world.coordinator.registry.find("j").job
        assert job.last_generation == 9
        assert not job.progress.has_trained, "an earlier run may have published"


async def test_a_broken_ledger_is_moved_aside_with_its_deltas() -> None:
    """Deltas have keys of their own."""
    store = MemoryStore()
    ledger = {"format": 1, "dataset_size": 8, "num_epochs": 1, "num_closed": 0, "deltas": "t"}
    ledger |= {"closed_returned": 0, "ignored": 0, "closed": [], "open": [], "members": {}}
    await store.put(keys.job_state("j"), as_json(good_state("j")))
    await store.put(keys.sample_ledger("j"), as_json(ledger))
    await store.put(keys.sample_delta("j", "t", 0), b"\xff garbage")
    async with served(store) as world:
        assert (await ask(world, "j")).quarantined
        mended = await ask(world, "j", apply=True)
        assert mended.goes_on
        base = await store.get(mended.records[0].moved_to)
        assert base is not None and base.value == as_json(ledger)
        moved = {i.value for i in (await store.range(keys.quarantined("j"))).items}
        assert moved == {base.value, b"\xff garbage"}
        assert await store.keys(keys.sample_deltas("j")) == ()


async def test_a_repair_without_known_bounds_needs_them_in_the_request() -> None:
    store = MemoryStore()
    async with served(store) as world:
        for member in await world.training("a", "b"):
            await asyncio.to_thread(member.close)
    await store.put(keys.job_state("j"), b"\xff")
    async with served(store) as world:
        with pytest.raises(InvalidSpec, match="bounds of job j are not known"):
            await ask(world, "j", apply=True)
        with pytest.raises(JobQuarantined):
            await standing(world, "j")
        bounds = {"min_members": 1, "max_members": 8, "desired_members": 2}
        assert (await ask(world, "j", apply=True, **bounds)).goes_on
        job = world.coordinator.registry.find("j").job
        assert (job.spec.max_members, job.progress.has_trained) == (8, True)


async def test_members_train_on_in_quarantine_and_rejoin_after_it() -> None:
    """The generation of a quarantined job does not break. After the repair, its members report
    their step and form the next generation."""
    store = MemoryStore()
    async with served(store) as world:
        trainers = await world.training("a", "b")
        address = world.address
        world.clients.clear()
        newest = await store.get(keys.generation("j", 1))
    assert newest is not None
    await store.put(newest.key, b"garbage")
    try:
        async with served(store, address=address) as world:
            await _until_notified(trainers)
            assert (await ask(world, "j", apply=True)).goes_on
            settled = [asyncio.to_thread(_settles, each) for each in trainers]
            await asyncio.gather(*settled)
            records = await asyncio.gather(
                *(asyncio.to_thread(each.await_generation, 1, 20.0) for each in trainers)
            )
            assert {record.roster.generation for record in records} == {2}
            assert {len(record.roster.entries) for record in records} == {2}
            assert max(record.roster.step for record in records) == 7
    finally:
        for trainer in trainers:
            await asyncio.to_thread(trainer.close)


async def _until_notified(trainers: Sequence[MemberSession]) -> None:
    def is_notified() -> bool:
        return all("quarantined" in each.waiting_for for each in trainers)

    await asyncio.to_thread(awaited, is_notified, 20.0, "both are notified")
    assert not any(each.is_broken(1) for each in trainers)


def _settles(trainer: MemberSession) -> None:
    trainer.await_break(1, 20.0)
    trainer.settle(7, has_state=True)


async def test_a_new_member_of_a_quarantined_job_is_refused_with_the_key() -> None:
    store = MemoryStore()
    await store.put(keys.job_state("j"), b"[]")
    async with served(store) as world:
        client = world.client("a", desired=1)
        with pytest.raises(JobQuarantined, match="/shoal/v1/jobs/j/state") as raised:
            await asyncio.to_thread(client.join)
        assert "shoal repair j" in raised.value.fix
        assert (await ask(world, "j", apply=True)).goes_on
        client = world.client("b", desired=1)
        await asyncio.to_thread(client.join)
        await asyncio.to_thread(propose, client)
        await asyncio.to_thread(client.await_generation, 0, 10.0)


async def test_a_repair_that_is_cancelled_can_be_repeated() -> None:
    """The job is still quarantined afterwards, and neither refuses calls as one that is being read
    nor stays so until the next leader."""
    store = SlowMembers()
    async with served(store) as world:
        await world.training("a")
        registry = world.coordinator.registry
        registry.quarantine("j", ValueError("a record that does not parse"))
        repair = asyncio.create_task(registry.resume_quarantined("j"))
        await store.is_read.wait()
        repair.cancel()
        await asyncio.wait([repair])
        with pytest.raises(JobQuarantined, match="a record that does not parse"):
            registry.find("j")
        assert (await ask(world, "j", apply=True)).goes_on


class SlowMembers(MemoryStore):
    """Store that does not answer the first read of a job's members."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = asyncio.Event()

    async def range(self, prefix: str) -> RangeResult:
        if prefix == keys.members("j") and not self.is_read.is_set():
            self.is_read.set()
            await asyncio.Event().wait()
        return await super().range(prefix)


async def test_a_repair_of_a_good_job_changes_nothing() -> None:
    async with served(MemoryStore()) as world:
        await world.training("a")
        reply = await ask(world, "j", apply=True)
        assert (reply.quarantined, reply.goes_on, reply.phase) == (False, True, "running")
        with pytest.raises(UnknownJob):
            await ask(world, "nobody")
