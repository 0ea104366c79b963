"""The upkeep of segments in memory and on disk."""

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.disk import WeightDisk
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.upkeep import WeightUpkeep
from shoal_server.serving import tasks
from shoal_server.serving.tasks import run_restarting, running


class ObservedDisk(WeightDisk):
    """A disk that notes on which threads its segments were listed."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.listed_on: list[int] = []
        self.is_listed = threading.Event()

    def all(self) -> list[tuple[str, bytes]]:
        self.listed_on.append(threading.get_ident())
        self.is_listed.set()
        return super().all()


class DiskWithOneError(ObservedDisk):
    """A disk that fails the first time that its segments are listed."""

    has_failed = False

    def all(self) -> list[tuple[str, bytes]]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().all()


async def test_the_work_goes_on_after_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further record wakes the upkeep."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)
    disk, unused = DiskWithOneError(tmp_path), cast("Any", None)
    memory = Memory(1000, SimpleNamespace(shards=list), Budget(1))  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        holdings = WeightHoldings(memory, threads, unused)
        upkeep = WeightUpkeep("ps-0", holdings, unused, unused, disk)
        async with running(run_restarting(upkeep.work_for_ever, "upkeep")):
            upkeep.allow_removal()
            assert await asyncio.to_thread(disk.is_listed.wait, 10.0)


async def test_a_slow_disk_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    disk, unused = ObservedDisk(tmp_path), cast("Any", None)
    memory = Memory(1000, SimpleNamespace(shards=list), Budget(1))  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        holdings = WeightHoldings(memory, threads, unused)
        upkeep = WeightUpkeep("ps-0", holdings, unused, unused, disk)
        async with running(upkeep.work_for_ever()):
            upkeep.allow_removal()
            assert await asyncio.to_thread(disk.is_listed.wait, 10.0)
    assert threading.get_ident() not in disk.listed_on
