"""`shoal accept-loss` with a coordinator over gRPC."""

import asyncio
import builtins
from dataclasses import replace

import pytest
from support.clusters.assignment_records import write_assignments
from support.clusters.http_world import served_over_http

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put
from shoal_server.etcd.records import assignments as records

LOST = ShardAssignment(shard_id=0, epoch=1, primary=Holder("ps-0", "1"), content=ShardContent.LOST)
UNTRAINED = replace(LOST, shard_id=1, content=ShardContent.NONE)


async def test_a_shard_that_is_lost_during_the_question_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The operator confirms the loss of the shards that the command has shown."""
    loop = asyncio.get_running_loop()
    async with served_over_http() as at:
        store = at.members.store

        def confirm(prompt: str) -> str:
            key = keys.shard_assignment("j", "run", 1)
            lost = records.encode_shard("run", replace(UNTRAINED, content=ShardContent.LOST))
            asyncio.run_coroutine_threadsafe(store.transact((), [Put(key, lost)]), loop).result()
            return "j"

        monkeypatch.setattr(builtins, "input", confirm)
        await write_assignments(store, JobAssignments(job="j", copies=1, shards=(LOST, UNTRAINED)))
        assert await at.shoal("accept-loss", "j", "--samples", "keep") == 0
        stored = await records.read(store, "j")
        assert stored is not None
        given_up, other = stored.assignments.shards
        assert given_up.accepted_loss is not None
        assert other.content is ShardContent.LOST
