"""Member keys stay for as long as their members do: across silence and across leaders."""

import asyncio
from collections.abc import Callable

from coordinator_world import served

from shoal_server.coordinator.leases import HostLeases
from shoal_server.etcd import keys
from shoal_server.etcd.api import LeaseId
from shoal_server.etcd.memory import MemoryStore

TTL_S = 30.0


async def test_a_host_that_was_silent_gets_a_lease_that_holds() -> None:
    """After the silence of a whole TTL the old lease is gone: the next one is another."""
    now_s = 0.0
    store = MemoryStore(clock=lambda: now_s)
    leases = HostLeases(store, TTL_S, clock=lambda: now_s)
    first = await leases.of("h")
    now_s = TTL_S + 1
    second = await leases.of("h")
    assert second != first
    await store.put("key", b"", second)
    now_s += TTL_S - 1
    assert await leases.of("h") == second, "a lease that still holds is prolonged"
    now_s += TTL_S - 1
    assert await store.get("key") is not None


async def test_a_new_leader_keeps_the_keys_of_members() -> None:
    """The dead leader's leases run out; the members, who are there, stay in the store."""
    now_s = 0.0
    store = MemoryStore(clock=lambda: now_s)
    async with served(store) as first:
        await first.training("a", "b")
        await first.coordinator.step_down()
        now_s = 20.0
        async with served(store):
            now_s = TTL_S + 1
            store.expire()
            assert await store.get(keys.member("j", "a")) is not None
            assert await store.get(keys.member("j", "b")) is not None


class CountingStore(MemoryStore):
    """Counts what is asked about leases."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.num_asked = 0

    async def grant(self, ttl_s: float) -> LeaseId:
        self.num_asked += 1
        await asyncio.sleep(0)
        return await super().grant(ttl_s)

    async def keep_alive(self, lease: LeaseId) -> float:
        self.num_asked += 1
        return await super().keep_alive(lease)


async def test_members_of_a_host_that_come_together_cost_one_lease() -> None:
    """The store is asked once for those who come at once, and not again while it is fresh."""
    now_s = 0.0
    store = CountingStore(lambda: now_s)
    leases = HostLeases(store, TTL_S, clock=lambda: now_s)
    found = await asyncio.gather(*(leases.of("h") for _ in range(5)))
    assert len(set(found)) == 1
    now_s = TTL_S / 3 - 1
    assert await leases.of_all(["h"]) == {"h": found[0]}
    assert store.num_asked == 1
    now_s = TTL_S / 3 + 1
    assert await leases.of("h") == found[0]
    assert store.num_asked == 2, "an older one is prolonged"


async def test_a_lease_that_turned_out_to_be_gone_is_replaced() -> None:
    """After `forget` the host has another, however fresh the old one was."""
    leases = HostLeases(MemoryStore(), TTL_S)
    before = await leases.of_all("gh")
    leases.forget("g")
    after = await leases.of_all("gh")
    assert after["g"] not in before.values()
    assert after["h"] == before["h"]
