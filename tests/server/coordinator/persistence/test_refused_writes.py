"""Records that etcd refuses to store stop only their own job; the leader's term continues."""

import asyncio

import pytest
from support.clusters.coordinator_world import propose, served
from support.clusters.hooked_store import HookedStore, Transaction

from shoal_proto.errors import JobQuarantined, RefusedError
from shoal_server.etcd import keys


class SmallStore(HookedStore):
    """Store that refuses one job's generation records, as etcd does above its limit."""

    async def before(self, transaction: Transaction) -> None:
        if any(each.key.startswith(keys.generations("huge")) for each in transaction.puts):
            raise RefusedError("etcd refused the request", seen="request is too large")


async def test_only_the_job_whose_record_is_too_large_is_quarantined() -> None:
    async with served(SmallStore()) as world:
        trainers = await world.training("a", "b")
        client = world.client("c", job="huge", desired=1, high=1)
        await asyncio.to_thread(client.join)
        with pytest.raises(JobQuarantined, match="request is too large"):
            await asyncio.to_thread(propose, client)
            await asyncio.to_thread(client.await_generation, 0, 10.0)
        assert not world.coordinator.term.deposed.is_set()
        (shown,) = [view for view in world.coordinator.view.jobs() if view.summary.job == "huge"]
        summary = shown.summary
        assert (summary.phase, "request is too large" in summary.reason) == ("quarantined", True)
        job = world.coordinator.registry.find("j").job
        assert (job.phase.value, sorted(job.members)) == ("running", ["a", "b"])
        assert all(not trainer.is_broken(1) for trainer in trainers)
