"""Member keys have no lease: a leader deletes the key of a member that it finds lost."""

import asyncio
from contextlib import aclosing

from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_server.core.limits import Limits
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, Revision

AN_HOUR_S = 3600.0


async def test_member_keys_stay_while_no_coordinator_leads() -> None:
    """Keys still exist after an hour without a leader: parameter servers fence by them."""
    now_s = 0.0
    store = MemoryStore(clock=lambda: now_s)
    async with served(store) as first:
        await first.training("a", "b")
        await first.coordinator.step_down()
        now_s = AN_HOUR_S
        store.expire()
        assert await store.get(keys.member("j", "a")) is not None
        assert await store.get(keys.member("j", "b")) is not None


async def test_the_next_leader_removes_members_that_ended_without_a_leader() -> None:
    """The leader gives members time to return, and deletes the keys of those that do not."""
    store = MemoryStore()
    async with served(store) as first:
        members = await first.training("a", "b")
        await first.coordinator.step_down()
        for member in members:
            await asyncio.to_thread(member.close)
    quick = Limits(heartbeat_s=0.05, join_s=20.0)
    async with served(store, quick) as second:
        actor = second.coordinator.registry.find("j")
        started = await store.range(keys.LEADER)
        watch = store.watch(keys.members("j"), Revision(started.revision + 1))
        left = set(actor.job.members)
        assert left == {"a", "b"}
        async with asyncio.timeout(10.0), aclosing(watch) as batches:
            while left:
                batch = await anext(batches)
                gone = [event.key for event in batch.events if event.kind is EventKind.DELETE]
                left -= {key.removeprefix(keys.members("j")) for key in gone}
        assert not actor.job.members
