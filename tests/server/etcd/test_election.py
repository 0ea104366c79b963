"""Election of the leader: a lost leader has a successor, and a deposed one can write nothing."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from support.clusters.etcd_fixture import etcd_processes, running_etcd
from support.clusters.memory_store import MemoryStore
from support.network.etcd_gate import open_gate
from support.processes.load import unhurried

from shoal_client.local.etcd import start_members
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore, LeaseId, Put, Renewal, absent
from shoal_server.etcd.election import Election, Leadership
from shoal_server.etcd.leader_key import Leader, LeaderCandidate
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.renewal import TRUSTED_TTLS

A, B = LeaderCandidate(address="a:1", http_url="http://a:2"), LeaderCandidate(address="b:1")

# A candidate that prints a line when it leads, and leads until it is killed.
CANDIDATE = """
import asyncio, sys
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.election import Election
from shoal_server.etcd.leader_key import LeaderCandidate

async def main():
    async with EtcdClient(EtcdConfig(endpoints=(sys.argv[1],))) as store:
        term = await Election(store, LeaderCandidate(address="child:1"), ttl_s=2).campaign()
        print("leads", flush=True)
        await term.lost.wait()

asyncio.run(main())
"""


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[KeyValueStore]:
    if request.param == "memory":
        memory = MemoryStore()
        yield memory
        await memory.close()
        return
    endpoint: str = request.getfixturevalue("etcd_endpoint")
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as client:
        await client.delete(keys.ROOT, prefix=True)
        yield client


@asynccontextmanager
async def leading(
    store: KeyValueStore, candidate: LeaderCandidate = A, ttl_s: float = 2
) -> AsyncIterator[Leadership]:
    async with asyncio.timeout(10):
        term = await Election(store, candidate, ttl_s=ttl_s).campaign()
    try:
        yield term
    finally:
        await term.resign()


async def test_a_candidate_without_rivals_leads_at_once(store: KeyValueStore) -> None:
    """The candidate leads within half a second, publishes its addresses, and resigns with its key
    deleted."""
    await store.range(keys.ROOT)
    begun_s = time.monotonic()
    async with leading(store) as term:
        took_s = time.monotonic() - begun_s
        print(f"led after {took_s * 1000:.1f} ms")
        assert took_s < unhurried(0.5)
        async with aclosing(Election(store, B).leaders()) as leaders:
            leader = await anext(leaders)
        assert leader == Leader(
            address="a:1", http_url="http://a:2", create_revision=term.create_revision
        )
        assert term.held
    assert await store.get(keys.LEADER) is None


async def test_the_background_renewal_has_the_lease_that_etcd_granted() -> None:
    """The pace and the trust of renewals last for the whole term, so a slow campaign must not count
    against them."""

    class Recording(MemoryStore):
        renewed_for_s = 0.0

        def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
            self.renewed_for_s = ttl_s
            return super().renew_in_background(lease, ttl_s)

    async with leading(store := Recording(), ttl_s=3):
        assert store.renewed_for_s == 3


@pytest.mark.long
@pytest.mark.sampled()
async def test_a_leader_renews_its_lease(store: KeyValueStore) -> None:
    """The term lasts longer than one lease, and a rival waits."""
    async with leading(store) as term:
        rival = asyncio.create_task(Election(store, B, ttl_s=2).campaign())
        # Time itself is tested: longer than a lease of two seconds.
        done, _ = await asyncio.wait({asyncio.create_task(term.lost.wait()), rival}, timeout=3)
        assert not done
        assert term.held
        rival.cancel()
        await asyncio.gather(rival, return_exceptions=True)


async def test_the_next_candidate_leads_at_once_after_a_resignation(store: KeyValueStore) -> None:
    """Observers see the new leader."""
    seen: list[str] = []

    async def observe() -> None:
        async with aclosing(Election(store, A).leaders()) as leaders:
            async for leader in leaders:
                seen.append(leader.address if leader else "")
                if leader is not None and leader.address == B.address:
                    return

    observing = asyncio.create_task(observe())
    async with leading(store) as first:
        second = asyncio.create_task(Election(store, B, ttl_s=2).campaign())
        # After two more round trips on the same connection, the rival has sent its requests.
        await store.range(keys.ROOT)
        await store.range(keys.ROOT)
        assert not second.done()
        begun_s = time.monotonic()
        await first.resign()
        async with asyncio.timeout(1):
            term = await second
        print(f"succeeded after {(time.monotonic() - begun_s) * 1000:.1f} ms")
        assert first.lost.is_set()
        assert first.reason == "resigned"
        assert not first.held
        assert term.create_revision > first.create_revision
        async with asyncio.timeout(5):
            await observing
        assert seen[-1] == "b:1"
        assert set(seen) <= {"", "a:1", "b:1"}
        await term.resign()


async def test_a_deposed_leader_writes_nothing(store: KeyValueStore) -> None:
    """Transactions with the old term's condition fail once the key belongs to another leader."""
    async with leading(store) as old:
        key = keys.job_state("digits")
        assert (await store.transact((old.condition,), (Put(key, b"old"),))).succeeded
        await store.delete(keys.LEADER)
        async with leading(store, B) as new:
            late = await store.transact((old.condition,), (Put(key, b"late"),))
            assert not late.succeeded
            assert (await store.transact((new.condition,), (Put(key, b"new"),))).succeeded
            async with asyncio.timeout(5):
                await old.lost.wait()
            assert "was deleted, or another process has it" in old.reason
            # Resigning a lost term does not affect the current leader.
            await old.resign()
            assert await store.get(keys.LEADER) is not None
        item = await store.get(key)
        assert item is not None
        assert item.value == b"new"


async def test_of_many_candidates_one_leads_at_a_time(store: KeyValueStore) -> None:
    """Eight candidates lead one after the other, and no two terms overlap."""
    terms: list[Leadership] = []
    running = 0

    async def serve(number: int) -> None:
        nonlocal running
        term = await Election(store, LeaderCandidate(address=f"c:{number}"), ttl_s=5).campaign()
        running += 1
        assert running == 1
        terms.append(term)
        await store.range(keys.ROOT)
        running -= 1
        await term.resign()

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(serve(number))
    revisions = [term.create_revision for term in terms]
    assert len(revisions) == 8
    assert revisions == sorted(set(revisions))


async def test_a_cancelled_campaign_leaves_nothing(store: KeyValueStore) -> None:
    """A candidate that is cancelled at any point does not block another one."""
    for pause in range(12):
        campaign = asyncio.create_task(Election(store, A, ttl_s=60).campaign())
        for _ in range(pause):
            await asyncio.sleep(0)
        campaign.cancel()
        (outcome,) = await asyncio.gather(campaign, return_exceptions=True)
        if isinstance(outcome, Leadership):
            await outcome.resign()
        async with asyncio.timeout(5):
            async with leading(store, B):
                pass


async def test_a_candidate_whose_lease_ends_before_it_leads_tries_again(
    store: KeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_alive, ended = store.keep_alive, list[LeaseId]()

    async def ending_the_first(lease: LeaseId) -> float:
        ttl_s = await keep_alive(lease)
        if not ended:
            await store.revoke(lease)
            ended.append(lease)
        return ttl_s

    monkeypatch.setattr(store, "keep_alive", ending_the_first)
    async with leading(store) as term:
        assert ended
        assert term.held


async def test_garbage_under_the_leaders_key_delays_a_campaign(store: KeyValueStore) -> None:
    """The campaign succeeds once the key is deleted. Observers see a leader without an address."""
    lease = await store.grant(60)
    await store.put(keys.LEADER, b"\xff{", lease)
    async with aclosing(Election(store, B).leaders()) as leaders:
        leader = await anext(leaders)
        assert leader is not None
        assert leader.address == ""
        campaign = asyncio.create_task(Election(store, A).campaign())
        await store.put(keys.LEADER + "ship", b"a neighbour")
        await store.delete(keys.LEADER)
        async with asyncio.timeout(5):
            term = await campaign
            while (leader := await anext(leaders)) is None:
                continue
        assert leader.address == "a:1"
        await term.resign()


@pytest.mark.parametrize("value", [b"\xff{", b'{"address": "a:1", "http_url": ""}'])
async def test_a_leaders_key_without_a_lease_prevents_no_candidate_from_leading(
    store: KeyValueStore, value: bytes
) -> None:
    """A key without a lease, which would never expire, was written over the key of a leader, whose
    term is lost. No candidate writes such a key, and the next one leads."""
    async with leading(store) as old:
        await store.put(keys.LEADER, value)
        async with asyncio.timeout(unhurried(5)):
            await old.lost.wait()
        assert not old.held
        async with leading(store, B) as new:
            late = await store.transact((old.condition,), (Put(keys.job_state("j"), b"late"),))
            assert not late.succeeded
            assert new.held
            await old.resign()
            assert new.held


@pytest.mark.long
async def test_a_killed_leader_has_a_successor_once_its_lease_ends(tmp_path: Path) -> None:
    """The successor leads within 6 s of the kill; the lease is 2 s."""
    with running_etcd(tmp_path) as endpoint:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CANDIDATE, endpoint), stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(20):
                assert child.stdout is not None
                await child.stdout.readuntil(b"leads\n")
            async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as client:
                successor = asyncio.create_task(Election(client, B, ttl_s=2).campaign())
                await client.range(keys.ROOT)
                child.kill()
                begun_s = time.monotonic()
                async with asyncio.timeout(6):
                    term = await successor
                print(f"succeeded {time.monotonic() - begun_s:.2f} s after the kill, lease of 2 s")
                await term.resign()
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()


async def test_a_leader_that_is_cut_off_ends_its_term_first(tmp_path: Path) -> None:
    """The term of the leader that is cut off ends before its successor leads, and a later
    transaction of that term fails."""
    with running_etcd(tmp_path) as endpoint:
        async with (
            open_gate(endpoint) as gate,
            EtcdClient(EtcdConfig(endpoints=(gate.endpoint,))) as cut_off,
            EtcdClient(EtcdConfig(endpoints=(endpoint,))) as client,
        ):
            async with asyncio.timeout(10):
                term = await Election(cut_off, A, ttl_s=2).campaign()
                successor = asyncio.create_task(Election(client, B, ttl_s=2).campaign())
                gate.silence()
                await term.lost.wait()
                assert not successor.done()
                assert not term.held
                assert "renewed" in term.reason
                key = keys.job_state("digits")
                new = await successor
            gate.restore()
            # A call that may be repeated replaces the broken connection.
            await cut_off.get(keys.LEADER)
            late = await cut_off.transact((term.condition,), (Put(key, b""),))
            assert not late.succeeded
            await term.resign()
            assert (await client.transact((new.condition, absent(key)), (Put(key, b""),))).succeeded
            await new.resign()


async def test_a_term_outlasts_a_restart_of_etcd(tmp_path: Path) -> None:
    """etcd is killed and started again within the lease."""
    with etcd_processes(tmp_path) as (supervisor, (etcd,)):
        async with (
            EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,))) as client,
            leading(client, ttl_s=10) as term,
        ):
            etcd.process.kill()
            await asyncio.to_thread(etcd.process.wait)
            await asyncio.to_thread(start_members, supervisor.spawn, [etcd.member])
            key = keys.job_state("digits")
            assert (await client.transact((term.condition,), (Put(key, b""),))).succeeded
            assert term.held


async def delay_the_loop(turn_s: float, for_s: float) -> None:
    """Make each turn of the event loop take `turn_s`, for `for_s` in all."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        time.sleep(turn_s)  # noqa: ASYNC251 - as work on the loop does
        await asyncio.sleep(0)


@pytest.mark.long
async def test_a_leader_whose_loop_is_busy_keeps_its_term(etcd_endpoint: str) -> None:
    """A call needs several turns of the loop, each of which takes a third of the lease here. The
    lease is renewed without waiting for them."""
    async with EtcdClient(EtcdConfig(endpoints=(etcd_endpoint,))) as client:
        await client.delete(keys.ROOT, prefix=True)
        async with leading(client) as term:
            await delay_the_loop(turn_s=0.7, for_s=4.0)
            assert term.held, term.reason
            written = await client.transact((term.condition,), (Put(keys.job_state("j"), b""),))
            assert written.succeeded


@pytest.mark.long
async def test_a_leader_whose_loop_hangs_has_a_successor(etcd_endpoint: str) -> None:
    """Renewals do not wait for the loop, but end when it has not run for some leases."""
    async with EtcdClient(EtcdConfig(endpoints=(etcd_endpoint,))) as client:
        await client.delete(keys.ROOT, prefix=True)
        async with leading(client) as term:
            time.sleep(TRUSTED_TTLS * 2 + 3)  # noqa: ASYNC251 - a loop that hangs
            assert not term.held
            async with asyncio.timeout(5), leading(client, B) as successor:
                assert successor.create_revision > term.create_revision
