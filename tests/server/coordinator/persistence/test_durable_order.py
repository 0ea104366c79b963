"""Order of durable writes and answers, and how many changes go into one write."""

import asyncio

import pytest
from support.clusters.coordinator_world import Served, served
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import Fenced, NotLeader
from shoal_proto.incarnation import new_incarnation
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.membership.events import MemberJoined, MemberLeft
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put, absent

WITHIN_S = 30.0
SPEC = JobSpec(job="j", min_members=1, max_members=8, desired_members=8)


class GatedStore(HookedStore):
    """Store whose transactions wait while the gate is closed; it records the keys of each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = asyncio.Event()
        """Set once a transaction waits at the gate."""
        self.written: list[set[str]] = []

    async def before(self, transaction: Transaction) -> None:
        self.waits.set()
        await self.gate.wait()
        self.written.append({operation.key for operation in transaction.then})

    def members_written(self) -> list[set[str]]:
        """Return the names of members in each transaction that has any."""
        prefix = keys.members("j")
        names = [{k.removeprefix(prefix) for k in w if k.startswith(prefix)} for w in self.written]
        return [each for each in names if each]


def arrival(name: str) -> MemberJoined:
    info = MemberInfo(host="h", address="127.0.0.1")
    return MemberJoined(member_id=name, incarnation=new_incarnation(), spec=SPEC, info=info)


def submitted(world: Served, event: MemberJoined | MemberLeft) -> "asyncio.Task[None]":
    actor: JobActor = world.coordinator.registry.find_or_create(SPEC)
    return asyncio.ensure_future(actor.submit(event))


async def at_gate(store: GatedStore) -> None:
    async with asyncio.timeout(WITHIN_S):
        await store.waits.wait()


async def test_changes_that_arrive_during_a_write_are_written_together() -> None:
    """A member that joins during a write needs no write of its own, and is answered after it."""
    store = GatedStore()
    async with served(store) as world:
        store.waits.clear()  # set by the new leader's own writes
        store.gate.clear()
        first = submitted(world, arrival("a"))
        await at_gate(store)
        others = [submitted(world, arrival(name)) for name in "bcd"]
        await asyncio.sleep(0)  # the state machine accepts them
        assert len(world.coordinator.registry.actors()[0].job.members) == 4
        assert not any(each.done() for each in (first, *others))
        store.gate.set()
        await asyncio.gather(first, *others)
        assert store.members_written() == [{"a"}, {"b", "c", "d"}]


async def test_a_refusal_is_sent_after_the_write_that_it_follows_from() -> None:
    """A member is refused as fenced only once its removal is durable."""
    store = GatedStore()
    async with served(store) as world:
        come = arrival("a")
        await submitted(world, come)
        leaving = MemberLeft(
            member_id="a", incarnation=come.incarnation, completed=False, reason="r"
        )
        store.waits.clear()
        store.gate.clear()
        left = submitted(world, leaving)
        await at_gate(store)
        again = submitted(world, leaving)
        await asyncio.sleep(0)  # the state machine refuses it
        await asyncio.sleep(0)
        assert not again.done(), "was refused although its removal was not durable"
        store.gate.set()
        await left
        with pytest.raises(Fenced):
            await again
        assert await store.get(keys.member("j", "a")) is None


async def test_a_leader_whose_write_fails_refuses_all_callers() -> None:
    """The leader's state is ahead of the store, so that it also refuses callers that wait."""
    store = GatedStore()
    async with served(store, conditions=(absent("another leads"),)) as world:
        await submitted(world, arrival("a"))
        store.waits.clear()
        store.gate.clear()
        waiting = [submitted(world, arrival("b"))]
        await at_gate(store)
        waiting.append(submitted(world, arrival("c")))
        await asyncio.sleep(0)
        await MemoryStore.transact(store, (), (Put("another leads", b""),))
        store.gate.set()
        for each in waiting:
            with pytest.raises(NotLeader):
                await each
        with pytest.raises(NotLeader):
            await submitted(world, arrival("d"))
        assert world.coordinator.term.deposed.is_set()
        assert store.members_written()[0] == {"a"}
        assert await store.get(keys.member("j", "c")) is None
