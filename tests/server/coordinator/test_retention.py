"""Retention: when records of jobs without members are removed."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import structlog
from support.clusters.coordinator_world import Served, entered, served
from support.clusters.hooked_store import Transaction, UnreliableStore
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession
from shoal_client.weights.watch import SeriesWatch
from shoal_proto.errors import InvalidSpec, NotLeader
from shoal_proto.incarnation import public_id
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.persistence.earlier_runs import EarlierRuns
from shoal_server.coordinator.retention import Retention
from shoal_server.coordinator.retention_policy import DAY_S, HOUR_S, RetentionPolicy
from shoal_server.core.membership.phases import Phase
from shoal_server.core.publications.limits import HELD_S
from shoal_server.core.publications.records import Publisher, SeriesHead
from shoal_server.core.retention import RetentionLimits
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Put, value_is
from shoal_server.etcd.records.series import encode_head
from shoal_server.status.reading import StatusQueries
from shoal_server.status.views import HealthView, JobSummary

ASSIGNMENT = "assignments/j/r/00000000"


@dataclass
class Sweeper:
    """The retention of a coordinator, with a clock that the test moves."""

    world: Served
    now_s: float = field(init=False)
    retention: Retention = field(init=False)

    def __post_init__(self) -> None:
        coordinator = self.world.coordinator
        self.now_s = coordinator.registry.clock()
        self.retention = Retention(
            self.world.store,
            coordinator.registry,
            coordinator.resetting,
            coordinator.plug_in,
            result_of=coordinator.result_of,
            limits=RetentionPolicy().limits,
            clock=lambda: self.now_s,
        )

    async def after(self, seconds: float) -> None:
        self.now_s += seconds
        await self.retention.sweep()

    @property
    def actor(self) -> JobActor:
        return self.world.coordinator.registry.find("j")

    def summary(self) -> JobSummary:
        coordinator = self.world.coordinator
        queries = StatusQueries(coordinator.view, coordinator.board)
        return queries.summary(queries.job("j"))


async def names(store: MemoryStore) -> set[str]:
    items = (await store.range(keys.ROOT)).items
    of_no_job = (keys.SNAPSHOT_ROOTS, keys.CLOCK)
    return {item.key.removeprefix(keys.ROOT) for item in items if item.key not in of_no_job}


async def leave(members: Sequence[MemberSession], *, completed: bool) -> None:
    for member in members:
        await asyncio.to_thread(member.leave, completed=completed, reason="it ended")


async def train_on_samples(world: Served, member: MemberSession) -> None:
    """Train on eight samples, which etcd records, with a loss of 0.5 at step 7."""
    request = LeaseRequest(token=member.token, dataset_size=8, num_epochs=1, sequence=1)
    request.num_samples = 8
    samples = world.parameters.sample_service
    leased = (await samples.Lease(request, None)).range  # type: ignore[arg-type]
    request.sequence = 2
    request.completed.append(leased)
    await samples.Lease(request, None)  # type: ignore[arg-type]
    await samples.write_all()
    process = public_id(member.token.incarnation)
    health = HealthView(received_unix_s=1.0, public_id=process, step=7, loss=0.5)
    world.coordinator.board.report("j", member.token.member_id, health)


async def test_a_finished_job_is_reduced_to_its_result_and_then_removed() -> None:
    """The next leader shows the result, although it has no reports and no ledger."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await train_on_samples(world, a)
        await leave([a], completed=True)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        before = await names(store)
        assert {"jobs/j/generations/000000000001", "jobs/j/samples"} <= before
        await sweeper.after(DAY_S - 60.0)
        assert await names(store) == before
        await sweeper.after(120.0)
        assert await names(store) == {"jobs/j/state"}
    async with served(store) as world:
        sweeper = Sweeper(world)
        summary = sweeper.summary()
        assert (summary.state, summary.step, summary.loss, summary.num_samples) == (
            "finished",
            7,
            0.5,
            8,
        )
        assert 0 < summary.begun_unix_s <= summary.ended_unix_s < sweeper.now_s
        await sweeper.after(29 * DAY_S)
        assert await names(store) == {"jobs/j/state"}
        await sweeper.after(2 * DAY_S)
        assert await names(store) == set()
        (again,) = await world.training("a")
        assert again.token.generation == 1


@pytest.mark.parametrize("mark", [b"{garbage", b'{"unix_s": "late"}', None])
async def test_a_leader_whose_clock_is_far_ahead_waits_before_it_removes(
    mark: bytes | None,
) -> None:
    """A leader compares its clock with the time that the last leader wrote, and removes nothing for
    hours if its clock is far ahead. Without a readable time it removes at once. A long outage looks
    the same, and only delays the removal."""
    store = MemoryStore()
    async with served(store) as world:
        right = Sweeper(world)
        await leave(await world.training("a", "b"), completed=True)
        for _ in range(2):
            await right.after(HOUR_S)  # writes the time to etcd
        if mark is not None:
            await store.put(keys.CLOCK, mark)
        kept = await names(store)
        wrong = Sweeper(world)
        with structlog.testing.capture_logs() as logs:
            await wrong.after(40 * DAY_S)
        if mark is not None:
            assert await names(store) != kept, "there is nothing to compare with"
            return
        assert await names(store) == kept
        (warning,) = [line for line in logs if line["event"] == "clock_implausible"]
        assert warning["ahead_s"] > 39 * DAY_S and warning["removes_nothing_for_s"] == 6 * HOUR_S
        await wrong.after(5.9 * HOUR_S)
        assert await names(store) == kept
        await wrong.after(0.2 * HOUR_S)
        assert "jobs/j/state" not in await names(store)


async def test_a_job_that_ended_in_the_future_is_removed_in_time() -> None:
    """The clock of the last leader was ahead; the next leader counts from the time it took over."""
    async with served(MemoryStore()) as world:
        coordinator = world.coordinator
        await leave(await world.training("a", "b"), completed=True)
        with patch.object(coordinator.registry.find("j").job, "phase_since_s", 1e12):
            await coordinator.registry.find("j").keep_result(coordinator.result_of("j"))
        await coordinator.step_down()
        await coordinator.lead(())
        at = Sweeper(world)
        await at.after(DAY_S + HOUR_S)
        assert at.actor.job.tally.is_cleared


async def test_the_record_of_earlier_runs_is_removed_in_time() -> None:
    """The record of earlier runs stays while a job of that name exists. A later leader removes it
    as well."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await leave([a], completed=True)
        await world.coordinator.resetting.reset("j")
        sweeper = Sweeper(world)
        await sweeper.after(29 * DAY_S)
        assert await names(store) == {"resets/j"}
    async with served(store) as world:
        (a,) = await world.training("a")
        sweeper = Sweeper(world)
        await sweeper.after(31 * DAY_S)
        assert "resets/j" in await names(store)
        await leave([a], completed=True)
        await world.coordinator.resetting.reset("j")
        await sweeper.after(0.0)
        assert await names(store) == set()


async def test_the_series_of_earlier_runs_are_removed_with_their_record() -> None:
    """Publications of the next run, which begins at generation 1, are accepted. A plain script's
    series stays."""
    store = MemoryStore()
    by_a_run, by_a_script = Publisher(generation=9), Publisher(script="p")
    for name, publisher in (("j/policy", by_a_run), ("j/own", by_a_script)):
        head = SeriesHead(number=3, epoch=1, publisher=publisher)
        await store.put(keys.series_head(name), encode_head(head))
    async with served(store) as world:
        await leave(await world.training("a"), completed=True)
        await world.coordinator.resetting.reset("j")
        series = {f"series/{each}/head" for each in ("j/policy", "j/own")}
        assert await names(store) == {"resets/j", *series}
        await Sweeper(world).after(31 * DAY_S)
        assert await names(store) == {"series/j/own/head"}


@pytest.mark.parametrize("is_removed", [False, True], ids=["summary", "after-rm"])
async def test_numbers_of_a_series_are_kept_while_it_is_read(is_removed: bool) -> None:
    """A connected reader gets the versions of the next run: their numbers continue. A reader of a
    plain script's series has no effect on the job."""
    store = MemoryStore()
    policy = SeriesHead(number=3, epoch=1, publisher=Publisher(generation=9))
    own = SeriesHead(number=3, epoch=1, publisher=Publisher(script="p"))
    await store.put(keys.series_head("j/policy"), encode_head(policy))
    await store.put(keys.series_head("j/own"), encode_head(own))
    async with served(store) as world:
        await leave(await world.training("a"), completed=True)
        resetting, sweeper = world.coordinator.resetting, Sweeper(world)
        if is_removed:
            await resetting.reset("j")
        with ExitStack() as stack:
            coordinators = stack.enter_context(closing(Coordinators([world.address])))
            of_script = stack.enter_context(closing(SeriesWatch(coordinators, "j/own")))
            await asyncio.to_thread(of_script.newest, -1, 10.0)
            assert not resetting.is_read("j")
            with closing(SeriesWatch(coordinators, "j/policy")) as watch:
                await asyncio.to_thread(watch.newest, -1, 10.0)
                await sweeper.after(31 * DAY_S)
                kept = "resets/j" if is_removed else "jobs/j/state"
                assert await names(store) == {kept, "series/j/policy/head", "series/j/own/head"}
            async with asyncio.timeout(20):
                while resetting.is_read("j"):  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.02)
            await sweeper.after(0.0)
            assert await names(store) == {"series/j/own/head"}


async def test_a_new_leader_removes_nothing_until_readers_have_come_back() -> None:
    store = MemoryStore()
    await store.put(keys.reset("j"), EarlierRuns(job="j", ended_unix_s=1.0).to_json())
    async with served(store) as world:
        sweeper = Sweeper(world)
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await sweeper.retention.run()
        await sweeper.after(HELD_S - 1.0)
        assert await names(store) == {"resets/j"}
        await sweeper.after(2.0)
        assert await names(store) == set()


async def test_the_series_of_a_script_outlives_a_job_of_its_name() -> None:
    """The retention removes series of the job itself only: nobody asked for a removal."""
    store = MemoryStore()
    for name, publisher in (
        ("j/policy", Publisher(generation=1)),
        ("j/own", Publisher(script="p")),
    ):
        head = SeriesHead(number=3, epoch=1, publisher=publisher)
        await store.put(keys.series_head(name), encode_head(head))
    async with served(store) as world:
        await leave(await world.training("a"), completed=True)
        await Sweeper(world).after(31 * DAY_S)
        assert await names(store) == {"series/j/own/head"}


async def test_the_result_of_a_job_is_written_with_its_end() -> None:
    """The leader ends before it sweeps: only that record has the loss."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await train_on_samples(world, a)
        retention = world.coordinator.retention
        retention.sweep = no_sweep  # type: ignore[method-assign]
        await leave([a], completed=True)
    async with served(store) as world:
        summary = Sweeper(world).summary()
        assert (summary.state, summary.step, summary.loss, summary.num_samples) == (
            "finished",
            7,
            0.5,
            8,
        )


async def no_sweep() -> None:
    """Sweep nothing, as if the leader had ended before."""


async def test_an_abandoned_job_fails_and_keeps_its_records() -> None:
    """The records of an abandoned job stay for a day, and until then `retry` lets members join
    again."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await store.transact([], [Put(keys.ROOT + ASSIGNMENT, b"whose form is of no interest")])
        await leave([a], completed=False)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        await sweeper.after(HOUR_S - 1.0)
        assert sweeper.actor.job.phase is Phase.COLLECT
        await sweeper.after(2.0)
        assert sweeper.actor.job.phase is Phase.FAILED
        assert sweeper.actor.job.reason == "it had no members for 3600 s, and nobody came back"
        kept = {"jobs/j/state", "jobs/j/generations/000000000001", ASSIGNMENT}
        assert await names(store) == kept
    async with served(store) as world:
        sweeper = Sweeper(world)
        assert sweeper.summary().state == "failed"
        await sweeper.after(DAY_S - 60.0)
        assert await names(store) == kept
        await world.coordinator.registry.retry("j", from_scratch=False)
        await sweeper.after(DAY_S)
        assert sweeper.actor.job.phase is Phase.COLLECT
        assert await names(store) == kept


async def test_a_job_with_members_never_fails_by_itself() -> None:
    async with served(MemoryStore()) as world:
        await world.joined("a", desired=2, low=2)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        await sweeper.after(100 * DAY_S)
        assert sweeper.actor.job.phase is Phase.COLLECT


async def test_a_member_that_joins_in_time_starts_the_hour_anew() -> None:
    async with served(MemoryStore()) as world:
        (a,) = await world.training("a")
        await leave([a], completed=False)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        back = await world.joined("b", desired=1)
        await sweeper.after(HOUR_S + 1.0)
        await leave([back], completed=False)
        await sweeper.after(0.0)
        await sweeper.after(HOUR_S - 1.0)
        assert sweeper.actor.job.phase is not Phase.FAILED


@pytest.mark.parametrize("new_leader", [False, True])
async def test_a_cleared_job_can_only_be_retried_from_scratch(new_leader: bool) -> None:
    """A cleared job has lost its parameters and its position in the data: it cannot continue from
    them."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await leave([a], completed=False)
        sweeper = Sweeper(world)
        await sweeper.actor.stop("enough")
        await sweeper.after(DAY_S + 1.0)
        assert await names(store) == {"jobs/j/state"}
        if not new_leader:
            await check_from_scratch_alone(world)
    if new_leader:
        async with served(store) as world:
            await check_from_scratch_alone(world)


async def check_from_scratch_alone(world: Served) -> None:
    registry = world.coordinator.registry
    with pytest.raises(InvalidSpec, match="shoal retry j --from-scratch"):
        await registry.retry("j", from_scratch=False)
    await registry.retry("j", from_scratch=True)
    again = await world.joined("b", desired=1)
    await entered(again, 0)
    assert not registry.find("j").job.tally.is_cleared


def deletes(transaction: Transaction) -> bool:
    return any(isinstance(o, Delete) and o.prefix for o in transaction.then)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_removal_that_fails_is_repeated(fails: str) -> None:
    """A failed removal leaves either all records of the job or only its result in etcd, and the
    next sweep repeats it."""
    store = UnreliableStore(deletes)
    async with served(store) as world:
        await leave(await world.training("a"), completed=True)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        before = await names(store)
        store.fails = fails
        await sweeper.after(DAY_S + 1.0)
        assert await names(store) == (before if fails == "before" else {"jobs/j/state"})
        assert sweeper.summary().state == "finished"
        store.fails = ""
        await sweeper.after(0.0)
        assert await names(store) == {"jobs/j/state"}
        assert sweeper.actor.job.tally.is_cleared


async def test_a_deposed_leader_removes_nothing() -> None:
    """The removal by a deposed leader fails with NotLeader, and all records stay."""
    store = MemoryStore()
    await store.transact([], [Put(keys.LEADER, b"this one")])
    async with served(store, conditions=(value_is(keys.LEADER, b"this one"),)) as world:
        await leave(await world.training("a"), completed=True)
        sweeper = Sweeper(world)
        await sweeper.after(0.0)
        await store.transact([], [Put(keys.LEADER, b"another one")])
        before = await names(store)
        with pytest.raises(NotLeader):
            await sweeper.after(DAY_S + 1.0)
        assert await names(store) == before


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"abandon_after_s": 0.0}, "--abandon-after-s"),
        ({"records_s": float("nan")}, "--retention-s"),
        ({"summary_s": 60.0}, r"--retention-s \(86400\) or more"),
    ],
)
def test_a_bad_policy_is_refused(policy: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        RetentionPolicy(**policy)


def test_the_limits_are_those_of_the_options() -> None:
    policy = RetentionPolicy(abandon_after_s=1.0, records_s=2.0, summary_s=3.0)
    assert policy.limits == RetentionLimits(abandon_after_s=1.0, records_s=2.0, summary_s=3.0)


async def test_a_job_removed_during_a_sweep_is_no_fault() -> None:
    """A job may be removed while the sweep counts its samples: the sweep goes on and logs no
    failure."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        await train_on_samples(world, a)
        sweeper, coordinator = Sweeper(world), world.coordinator
        samples = world.parameters.sample_service
        counts = samples.counts

        async def counts_and_loses_it(job: str) -> LedgerCounts | None:
            found = await counts(job)
            if coordinator.registry.actor_if_known(job) is not None:
                await coordinator.resetting.reset(job)
            return found

        with (
            patch.object(samples, "counts", counts_and_loses_it),
            structlog.testing.capture_logs() as logs,
        ):
            # The coordinator also sweeps as soon as the job is over: either of the two may be
            # first.
            await leave([a], completed=True)
            await sweeper.after(0.0)
        assert coordinator.registry.actor_if_known("j") is None
        assert [entry for entry in logs if entry["event"] == "job_not_swept"] == []
