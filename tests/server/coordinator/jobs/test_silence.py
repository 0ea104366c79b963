"""Members without heartbeats, and how the coordinator finds them."""

import asyncio

import pytest
from support.clusters.coordinator_world import served
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import Generation, JobSpec, MemberInfo, Step
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import HeartbeatReceived, MemberJoined, NextStepReached

WITHIN_S = 60.0
SPEC = JobSpec(job="j", min_members=1, max_members=8, desired_members=8)
LIMITS = Limits(heartbeat_s=0.2, join_s=120.0)


async def test_a_silent_member_is_found_while_events_of_another_never_end() -> None:
    """The search runs at its times, not only when no event waits."""
    async with served(MemoryStore(), LIMITS) as world:
        actor = world.coordinator.registry.find_or_create(SPEC)
        names = {name: new_incarnation() for name in ("silent", "busy")}
        for name, incarnation in names.items():
            actor.open_stream(name, incarnation)
            info = MemberInfo(host="h", address="127.0.0.1")
            event = MemberJoined(member_id=name, incarnation=incarnation, spec=SPEC, info=info)
            await actor.submit(event)
        nothing = NextStepReached(
            member_id="busy",
            incarnation=names["busy"],
            generation=Generation(9),
            next_step=Step(0),
        )
        async with asyncio.timeout(WITHIN_S):
            while "silent" in actor.job.members:
                actor.heartbeat(HeartbeatReceived(member_id="busy", incarnation=names["busy"]), 0)
                await actor.submit(nothing)
                await asyncio.sleep(0)
        await actor.submit(nothing)  # handled after all effects of the loss
        assert list(actor.job.members) == ["busy"]
        (lost,) = [e for e in world.coordinator.board.events("j") if e.kind == "member_removed"]
        assert lost.reason.startswith("silent: no heartbeat for ")
        assert f"{LIMITS.lease_s:g} s are allowed" in lost.reason


class HeldStore(HookedStore):
    """A store whose transactions wait while `is_open` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open, self.has_begun = asyncio.Event(), asyncio.Event()
        self.is_open.set()

    async def before(self, transaction: Transaction) -> None:
        self.has_begun.set()
        await self.is_open.wait()


async def test_a_silent_member_is_found_after_a_retry_that_was_cancelled() -> None:
    """The call may end before etcd answers (Ctrl-C, a timeout); members may join all the same."""
    limits = Limits(heartbeat_s=0.05, join_s=2.0)
    store = HeldStore()
    async with served(store, limits) as world:
        registry = world.coordinator.registry
        actor = registry.find_or_create(SPEC)
        await actor.stop("enough")
        # Lets the timers of the ended job end.
        await actor.wait_durable(WITHIN_S)
        store.is_open.clear()
        store.has_begun.clear()
        retry = asyncio.create_task(registry.retry("j", from_scratch=False))
        await store.has_begun.wait()
        retry.cancel()
        with pytest.raises(asyncio.CancelledError):
            await retry
        store.is_open.set()
        incarnation = new_incarnation()
        stream = actor.open_stream("silent", incarnation)
        info = MemberInfo(host="h", address="127.0.0.1")
        await actor.submit(
            MemberJoined(member_id="silent", incarnation=incarnation, spec=SPEC, info=info)
        )
        async with asyncio.timeout(WITHIN_S):
            while await stream.notices.get() is not None:
                pass
        assert not actor.job.members
