"""Charts of a job are kept in etcd, and continued by the next leader."""

import asyncio
import json
import math
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import structlog
from support.clusters.coordinator_world import Served, leader_store, served
from support.clusters.memory_store import MemoryStore

from shoal_client.membership.member_session import MemberSession
from shoal_proto.health import CourseFigures, RunOrigin
from shoal_proto.incarnation import public_id
from shoal_server.coordinator import history
from shoal_server.coordinator.assembly import Coordinator
from shoal_server.coordinator.history import READ_EACH_S, HistoryKeeper
from shoal_server.coordinator.kept_history import read
from shoal_server.core.limits import Limits
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Put
from shoal_server.status import board as board_module
from shoal_server.status.reading import StatusQueries
from shoal_server.status.views import HealthView

RUN = RunOrigin(command="train.py --lr 0.1", commit="5f" * 20, is_modified=False)


def keeper(world: Served) -> HistoryKeeper:
    """Return a second keeper; the coordinator's own writes nothing so early."""
    coordinator = world.coordinator
    return HistoryKeeper(world.store, coordinator.registry, coordinator.board)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not holds():  # noqa: ASYNC110 - the coordinator reads in the background
            await asyncio.sleep(0)


def report(
    world: Served, member: MemberSession, course: CourseFigures | None = None, **figures: float
) -> None:
    token = member.token
    health = HealthView(
        public_id=public_id(token.incarnation),
        received_unix_s=time.time(),
        step=int(figures.get("step", 7)),
        loss=figures.get("loss", 0.5),
        samples_per_s=100.0,
        step_time_s=figures.get("step_time_s", 0.01),
        course=course,
    )
    world.coordinator.board.report("j", token.member_id, health)


async def test_reports_of_members_are_charted_and_read_by_the_next_leader() -> None:
    """The record has loss, throughput, step times by rank, the generations, and the job's command
    and commit."""
    store = MemoryStore()
    async with served(store) as world:
        members = await world.training("a", "b")
        report(world, members[0], step=7, loss=0.25)
        report(world, members[1], step=8, loss=0.75, course=CourseFigures(run=RUN))
        own = keeper(world)
        await own.load_histories()
        own.record_readings()
        await own.keep()
    async with served(store) as world:
        await keeper(world).load_histories()
        assert world.coordinator.board.run_origin("j") == RUN
        found = world.coordinator.board.history("j")
        assert found is not None
        stories, series = found
        view = series.view()
        assert (view.step[0], view.loss[0], view.samples_per_s[0]) == (8, 0.5, 200.0)
        assert [len(rank) for rank in view.step_s_by_rank] == [len(view.step)] * 2
        assert [each.line for each in stories.changes] == ["generation 1: 2 begin"]


async def test_the_sum_of_steps_does_not_fall_when_another_coordinator_leads() -> None:
    """The sum is the step of an asynchronous job. Processes that were replaced or have left count
    on; a process that reports again counts once, also to a coordinator that led before."""
    store = MemoryStore()
    async with served(store) as world:
        a, b = await world.training("a", "b")
        board = world.coordinator.board
        for member, process, step in (("b", "replaced", 30), ("c", "left", 2)):
            health = HealthView(public_id=process, received_unix_s=time.time(), step=step)
            board.report("j", member, health)
        report(world, a, step=70)
        report(world, b, step=5)
        assert board.total_steps("j") == 107
        own = keeper(world)
        await own.load_histories()
        await own.keep()
        await keeper(world).load_histories()
        assert board.total_steps("j") == 107
        board.reset_reports("j")
        await keeper(world).load_histories()
        assert board.total_steps("j") == 107
        report(world, a, step=71)
        assert board.total_steps("j") == 108


async def test_the_next_leader_knows_how_the_last_member_of_a_job_ended() -> None:
    """An interrupted job may wait for its next worker for days."""
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        own = keeper(world)
        await own.load_histories()
        reason = "ValueError('no such file')"
        await asyncio.to_thread(member.leave, completed=False, reason=reason)
        await own.keep()
    async with served(store) as world:
        coordinator = world.coordinator
        await until(lambda: coordinator.registry.actor_if_known("j") is not None)
        await keeper(world).load_histories()
        queries = StatusQueries(coordinator.view, coordinator.board)
        summary = queries.summary(queries.job("j"))
        assert summary.state == "interrupted"
        assert summary.last_ending == "a: left: ValueError('no such file')"


async def test_a_coordinator_that_leads_again_counts_its_history_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator has stored charts and pauses in its earlier term, and continues them as
    another coordinator would. A run that ended meanwhile leaves nothing."""

    async def idle(self: HistoryKeeper) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(HistoryKeeper, "run", idle)
    store = MemoryStore()
    async with served(store) as world:
        coordinator, board = world.coordinator, world.coordinator.board
        (member,) = await world.training("a")
        stored = read(kept())
        board.restore_history("j", stored.series, stored.changes, extra_s=5.0)
        report(world, member)
        board.report("removed", "a", HealthView(public_id="x", received_unix_s=0.0, step=9))
        own = keeper(world)
        await own.load_histories()
        await own.keep()
        before = board.history("j")
        assert before is not None
        await coordinator.step_down()
        await coordinator.lead(())
        await keeper(world).load_histories()
        after = board.history("j")
        assert after is not None
        assert board.paused_s("j") == 5.0
        assert after[1].view() == before[1].view()
        assert list(after[0].changes) == list(before[0].changes)
        assert board.highest_step("removed") == 0


SERIES = {
    "interval_s": 5.0,
    "unix_s": [100.0, 105.0],
    "generation": [1, 1],
    "step": [1, 2],
    **{name: [1.0, None] for name in ("loss", "samples_per_s", "step_s", "slowest_step_s")},
    "staleness": [None, None],
    "step_s_by_rank": [[0.1, 0.2]],
}
CHANGE = {"generation": 1, "unix_s": 1.0, "cause": "", "line": "", "num_members": 1}
LOGGED = {"name": "x", "newest_step": 3, "newest": 1.0, "interval_steps": 1}


def kept(**changed: object) -> bytes:
    """Encode a record with these changes."""
    record = {"begun_unix_s": 0.0, "series": SERIES, "changes": [CHANGE], "logged": [], **changed}
    return zlib.compress(json.dumps(record).encode())


def test_a_good_record_is_read_although_it_has_unknown_fields() -> None:
    points = {"steps": [0, 3], "values": [1.0, 2.0]}
    found = read(kept(logged=[LOGGED | points], added_later={"x": 1}))
    assert (found.series.step, found.logged[0].steps) == ((1, 2), (0, 3))


@pytest.mark.parametrize(
    "value",
    [
        b"no history",
        zlib.compress(b"[" * 100_000),
        zlib.compress(b" " * (17 << 20)),
        kept(begun_unix_s=math.nan),
        kept(steps_by_process={"a": 10**300}),
        kept(gone_steps=-1),
        kept(last_removal="a" * 10_000),
        kept(extra_s="Infinity"),
        kept(series=SERIES | {"step": [1]}),
        kept(series=SERIES | {"step_s_by_rank": [[0.1]]}),
        kept(series=SERIES | {"unix_s": [1e300, 1.1e300]}),
        kept(series=SERIES | {"interval_s": "NaN"}),
        kept(series=SERIES | {"generation": [1, 10**300]}),
        kept(series={name: list(range(1000)) for name in SERIES} | {"interval_s": 1.0}),
        kept(changes=[CHANGE] * 101),
        kept(changes=[CHANGE | {"unix_s": 1e300}]),
        kept(logged=[LOGGED] * 1000),
        kept(logged=[LOGGED | {"steps": [1, 2], "values": [1.0]}]),
        kept(logged=[LOGGED | {"newest_step": 10**300}]),
    ],
)
async def test_a_record_that_cannot_be_read_loses_only_the_charts(value: bytes) -> None:
    """A warning is logged, and the job itself continues."""
    store = MemoryStore()
    async with served(store) as world:
        await world.training("a")
        await store.transact((), [Put(keys.history("j"), value)])
        with structlog.testing.capture_logs() as logs:
            await keeper(world).load_histories()
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
            "history_unreadable"
        ]
        assert world.coordinator.registry.find("j").job.running is not None


async def test_no_charts_are_written_for_a_removed_job() -> None:
    """The next run under the same name would continue them."""
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        report(world, member)
        own = keeper(world)
        await own.load_histories()
        own.record_readings()
        await store.transact((), [Delete(keys.job_prefix("j"), prefix=True)])
        await own.keep()
        assert await store.get(keys.history("j")) is None


async def test_a_removed_job_is_forgotten() -> None:
    """The job's charts leave the memory, and those of the next job of this name are read."""
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        own = keeper(world)
        await own.load_histories()
        await asyncio.to_thread(member.leave, completed=True, reason="it ended")
        await world.coordinator.resetting.reset("j")
        await own.keep()
        await world.training("b")
        begun_s = world.coordinator.registry.find("j").job.tally.begun_s
        await store.transact((), [Put(keys.history("j"), kept(begun_unix_s=begun_s))])
        await own.load_histories()
        found = world.coordinator.board.history("j")
        assert found is not None and found[1].view().step == (1, 2)


async def test_a_retried_job_that_the_board_had_dropped_keeps_its_charts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The board drops ended jobs if there are many; a retry makes a new one for the job."""
    monkeypatch.setattr(board_module, "MAX_JOBS", 1)
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        begun_s = world.coordinator.registry.find("j").job.tally.begun_s
        await store.transact((), [Put(keys.history("j"), kept(begun_unix_s=begun_s))])
        own, board = keeper(world), world.coordinator.board
        await own.load_histories()
        await asyncio.to_thread(member.leave, completed=False, reason="killed")
        await world.coordinator.registry.find("j").stop("enough")
        board.event("other", "job_finished", "all is done")
        assert board.history("j") is None
        await own.load_histories()
        await own.keep()
        await world.coordinator.registry.retry("j", from_scratch=False)
        await own.keep()
        await own.load_histories()
        await own.keep()
        found = board.history("j")
        assert found is not None and found[1].view().step == (1, 2)
        stored = await store.get(keys.history("j"))
        assert stored is not None and read(stored.value).series.step == (1, 2)


async def test_a_slow_etcd_does_not_delay_further_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait after a reading grows with the time that the reading took, and not with the time in
    which etcd stores the charts."""
    now_s, waits = 0.0, list[float]()

    class SlowlyKept(HistoryKeeper):
        async def keep(self) -> None:
            nonlocal now_s
            now_s += 5.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        waits.append(seconds)
        if now_s > 60.0:
            raise asyncio.CancelledError

    clock = SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s)
    monkeypatch.setattr(history, "time", clock)
    monkeypatch.setattr(history, "asyncio", SimpleNamespace(sleep=sleep))
    coordinator = Coordinator(MemoryStore(), Limits())
    slow = SlowlyKept(leader_store(MemoryStore()), coordinator.registry, coordinator.board)
    with pytest.raises(asyncio.CancelledError):
        await slow.run()
    assert set(waits) == {READ_EACH_S}


async def test_an_old_report_of_a_member_is_not_charted() -> None:
    """A member's last report does not describe its present state."""
    async with served(MemoryStore()) as world:
        (member,) = await world.training("a")
        token = member.token
        old = HealthView(
            public_id=public_id(token.incarnation),
            received_unix_s=time.time() - 60,
            step=1,
            loss=1.0,
        )
        world.coordinator.board.report("j", "a", old)
        keeper(world).record_readings()
        found = world.coordinator.board.history("j")
        assert found is not None and found[1].view().unix_s == ()
