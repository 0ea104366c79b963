"""Members without heartbeats, and how the coordinator finds them."""

import asyncio

from support.clusters.coordinator_world import served
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
