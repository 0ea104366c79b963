"""Automatic restores of lost jobs: they run side by side, and are repeated on failure."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from shoal_proto.errors import NothingLost, SnapshotDamaged, Unavailable
from shoal_server.coordinator.shards import automatic_restores
from shoal_server.coordinator.shards.automatic_restores import AutomaticRestores
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.core.shards.losses import RestoreAttempt

LIMIT_S = 20.0
LOST = [ShardAssignment(shard_id=0, epoch=1, primary=Holder("s", "1"), content=ShardContent.LOST)]
RESTORED = RestoreAttempt(is_restored=True)
NO_SNAPSHOT = RestoreAttempt(is_restored=False, reason="No snapshot of it is at /s.")


class Storages:
    """Outcomes of restoring each job, and the notifications about it."""

    def __init__(self, **answers: RestoreAttempt | Exception | asyncio.Event) -> None:
        self.answers: dict[str, RestoreAttempt | Exception | asyncio.Event] = dict(answers)
        self.asked: list[str] = []
        self._news = asyncio.Condition()
        self.restores = AutomaticRestores(self._restore, self._tell)

    async def _restore(self, job: str, lost: Sequence[ShardAssignment]) -> RestoreAttempt:
        self.asked.append(job)
        answer = self.answers[job]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return RESTORED
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _tell(self, job: str) -> None:
        self._told = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self._news:
            await self._news.wait_for(holds)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[[Mapping[str, object]], Storages]]:
    made: list[Storages] = []

    def make(answers: Mapping[str, object]) -> Storages:
        made.append(Storages(**answers))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        await each.restores.close()


Opened = Callable[[Mapping[str, object]], Storages]


async def test_a_restore_that_hangs_does_not_delay_another_job(opened: Opened) -> None:
    """The first restore hangs while the other job's ends; both were begun at the same time."""
    storages = opened({"slow": asyncio.Event(), "other": NO_SNAPSHOT})
    assert storages.restores.outcome("slow", LOST) is None
    assert storages.restores.outcome("other", LOST) is None
    await storages.until(lambda: storages.restores.outcome("other", LOST) is not None)
    assert storages.restores.outcome("other", LOST) == NO_SNAPSHOT
    assert storages.restores.outcome("slow", LOST) is None
    assert sorted(storages.asked) == ["other", "slow"]


async def test_a_long_restore_is_reported_and_continues(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic_restores, "REPORTED_AFTER_S", 0.05)
    storages = opened({"slow": asyncio.Event()})
    assert storages.restores.outcome("slow", LOST) is None
    await storages.until(lambda: storages.restores.outcome("slow", LOST) is not None)
    assert storages.asked == ["slow"]


async def test_a_restore_is_repeated_while_its_storage_is_unavailable(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is reported meanwhile; a restore from a damaged snapshot is tried once."""
    monkeypatch.setattr(automatic_restores, "RESTORE_AGAIN_S", 0.02)
    damaged = SnapshotDamaged("the manifest is not what was written")
    storages = opened({"away": Unavailable("the storage is away"), "damaged": damaged})
    for job in ("away", "damaged"):
        assert storages.restores.outcome(job, LOST) is None
    await storages.until(lambda: storages.asked.count("away") >= 3)
    tried = storages.restores.outcome("damaged", LOST)
    assert tried is not None
    assert "not what was written" in tried.reason
    assert storages.asked.count("damaged") == 1
    tried = storages.restores.outcome("away", LOST)
    assert tried is not None
    assert "the storage is away" in tried.reason
    storages.answers["away"] = RESTORED
    await storages.until(lambda: storages.restores.outcome("away", LOST) is None)


async def test_a_job_without_lost_shards_is_not_restored_when_its_turn_comes(
    opened: Opened,
) -> None:
    """The loss ends while the restores of four other jobs hang."""
    hang = {f"slow{i}": asyncio.Event() for i in range(automatic_restores.RESTORES_AT_ONCE)}
    storages = opened({**hang, "mended": RESTORED, "lost": NO_SNAPSHOT})
    for job in storages.answers:
        assert storages.restores.outcome(job, LOST) is None
    storages.restores.forget("mended")
    hang["slow0"].set()
    await storages.until(lambda: storages.restores.outcome("lost", LOST) is not None)
    assert "lost" in storages.asked and "mended" not in storages.asked


async def test_a_restore_that_finds_nothing_lost_leaves_the_next_loss_to_another(
    opened: Opened,
) -> None:
    """Nothing is noted as a reason: the shards of a later loss are restored."""
    storages = opened({"job": NothingLost("nothing is lost any more")})
    assert storages.restores.outcome("job", LOST) is None
    await storages.until(lambda: len(storages.asked) == 1)
    storages.answers["job"] = NO_SNAPSHOT
    assert storages.restores.outcome("job", LOST) is None
    await storages.until(lambda: storages.restores.outcome("job", LOST) == NO_SNAPSHOT)
    assert len(storages.asked) == 2
