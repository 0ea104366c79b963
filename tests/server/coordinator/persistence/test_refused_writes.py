"""Records that etcd refuses to store stop only their own job; the leader's term continues."""

import asyncio
from collections.abc import Sequence

import pytest
from support.clusters.coordinator_world import propose, served

from shoal_proto.errors import JobQuarantined, RefusedError
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Operation, Put, TransactionResult
from shoal_server.etcd.memory import MemoryStore


class SmallStore(MemoryStore):
    """Store that refuses one job's generation records, as etcd does above its limit."""

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        if any(isinstance(op, Put) and op.key.startswith(keys.generations("huge")) for op in then):
            raise RefusedError("etcd refused the request", seen="request is too large")
        return await super().transact(compares, then, otherwise)


async def test_only_the_job_whose_record_is_too_large_is_quarantined() -> None:
    async with served(SmallStore()) as world:
        trainers = await world.training("a", "b")
        client = world.client("c", job="huge", desired=1, high=1)
        await asyncio.to_thread(client.join)
        with pytest.raises(JobQuarantined, match="request is too large"):
            await asyncio.to_thread(propose, client)
            await asyncio.to_thread(client.await_generation, 0, 10.0)
        assert not world.coordinator.term.deposed.is_set()
        (shown,) = [view for view in world.coordinator.view.jobs() if view.job == "huge"]
        assert (shown.phase, "request is too large" in shown.reason) == ("quarantined", True)
        job = world.coordinator.registry.find("j").job
        assert (job.phase.value, sorted(job.members)) == ("running", ["a", "b"])
        assert all(not trainer.is_broken(1) for trainer in trainers)
