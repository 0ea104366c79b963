"""Moves of shards are logged together: once there are no more for a time, or after a limit."""

import asyncio
from collections import Counter

import pytest

from shoal_server.coordinator.shards import loss_log
from shoal_server.coordinator.shards.loss_log import MoveLog

TO_1 = Counter({("ps-0", "ps-1"): 2})
TO_0 = Counter({("ps-1", "ps-0"): 1})


class Lines(list[tuple[str, str]]):
    """Logged lines, each with its job."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def tell(self, job: str, line: str) -> None:
        self.append((job, line))
        self.came.set()


@pytest.fixture
async def lines() -> Lines:
    return Lines()


@pytest.fixture
def moves(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> MoveLog:
    monkeypatch.setattr(loss_log, "QUIET_S", 0.05)
    monkeypatch.setattr(loss_log, "AT_MOST_S", 0.2)
    return MoveLog(lines.tell)


async def first(lines: Lines) -> None:
    async with asyncio.timeout(30):
        await lines.came.wait()


async def test_moves_of_a_job_have_a_line_per_pair_of_servers(moves: MoveLog, lines: Lines) -> None:
    for _ in range(3):
        moves.add("a", TO_1)
    moves.add("a", TO_0)
    assert lines == []
    await first(lines)
    assert lines == [
        ("a", "6 shards moved from ps-0 to ps-1"),
        ("a", "1 shard moved from ps-1 to ps-0"),
    ]


async def test_moves_without_a_pause_are_logged(moves: MoveLog, lines: Lines) -> None:
    """The line has all moves since the first."""
    num_added = 0
    async with asyncio.timeout(30):
        while not lines:
            moves.add("a", TO_0)
            num_added += 1
            await asyncio.sleep(0.001)
    assert lines[0] == ("a", f"{num_added} shards moved from ps-1 to ps-0")


async def test_moves_of_a_forgotten_job_are_not_logged(moves: MoveLog, lines: Lines) -> None:
    moves.add("a", TO_1)
    moves.add("b", TO_1)
    moves.forget("a")
    await first(lines)
    assert {job for job, _ in lines} == {"b"}
