"""The comparison of primaries with their backups continues while the server runs."""

import asyncio

import pytest
from support.clusters.parameter_servers import config

from shoal_server.etcd.memory import MemoryStore
from shoal_server.parameters.process import running
from shoal_server.parameters.replication.comparing import Comparing
from shoal_server.serving import tasks

LIMIT_S = 30.0


async def test_copies_are_compared_again_after_an_error_of_any_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_begun, goes_on = 0, asyncio.Event()

    async def fail_once(comparing: Comparing) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise KeyError("a piece")
        goes_on.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(Comparing, "run_for_ever", fail_once)
    async with running(config("ps-0"), MemoryStore()), asyncio.timeout(LIMIT_S):
        await goes_on.wait()
