"""Member keys stay for as long as their members do: across silence and across leaders."""

from coordinator_world import served

from shoal_server.coordinator.leases import HostLeases
from shoal_server.etcd import keys
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
