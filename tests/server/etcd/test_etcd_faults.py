"""The client while etcd is killed, halted, cut off or compacted, mostly during writes."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from support.clusters.etcd_fixture import etcd_processes
from support.network.etcd_gate import open_gate

from shoal_client.local.etcd import RunningEtcd, start_members
from shoal_client.local.process import Supervisor
from shoal_proto.errors import CorruptError, RetryError, Unavailable
from shoal_server.etcd.api import EventKind, Put, Revision, WatchEvent, absent
from shoal_server.etcd.mirror import PrefixMirror
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

from .conftest import compact_etcd

PREFIX = "/shoal/test/"

Cluster = tuple[Supervisor, tuple[RunningEtcd, ...]]


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Cluster]:
    with etcd_processes(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    with etcd_processes(tmp_path, num_members=3) as cluster:
        yield cluster


class Traffic:
    """A writer and a watch that continue during the faults of a test."""

    def __init__(self, client: EtcdClient) -> None:
        self.acknowledged: list[tuple[Revision, str]] = []
        self.events: list[WatchEvent] = []
        self.num_resets = 0
        self._client = client
        self._delivered = asyncio.Condition()

    async def write(self) -> None:
        number = 0
        while True:
            key = f"{PREFIX}{number:06}"
            try:
                self.acknowledged.append((await self._client.put(key, key.encode()), key))
            except RetryError:
                continue
            number += 1

    async def watch(self, start: Revision) -> None:
        async with aclosing(self._client.watch(PREFIX, start)) as batches:
            async for batch in batches:
                self.num_resets += batch.reset
                self.events.extend(batch.events)
                async with self._delivered:
                    self._delivered.notify_all()

    async def past(self, num_acknowledged: int, limit_s: float = 20) -> None:
        """Wait until so many writes are acknowledged, and the watch has delivered them."""
        async with asyncio.timeout(limit_s), self._delivered:
            await self._delivered.wait_for(
                lambda: (
                    len(self.acknowledged) >= num_acknowledged
                    and self.events[-1].mod_revision >= self.acknowledged[num_acknowledged - 1][0]
                )
            )

    async def more(self, number: int, limit_s: float = 20) -> None:
        """Wait until so many further writes are acknowledged and delivered."""
        await self.past(len(self.acknowledged) + number, limit_s)


@asynccontextmanager
async def traffic(client: EtcdClient) -> AsyncIterator[Traffic]:
    """Run traffic in the block, and compare it with etcd's own history at the end."""
    start = Revision((await client.range(PREFIX)).revision + 1)
    flow = Traffic(client)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(flow.write()), group.create_task(flow.watch(start))]
        await flow.more(20)
        yield flow
        tasks[0].cancel()
        await flow.past(len(flow.acknowledged))
        tasks[1].cancel()
    await _check(flow, client, start)


async def _check(flow: Traffic, client: EtcdClient, start: Revision) -> None:
    delivered = [(event.mod_revision, event.key) for event in flow.events]
    history: list[tuple[Revision, str]] = []
    async with aclosing(client.watch(PREFIX, start)) as batches:
        async with asyncio.timeout(10):
            async for batch in batches:
                history.extend((event.mod_revision, event.key) for event in batch.events)
                if history[-1][0] >= delivered[-1][0]:
                    break
    assert flow.num_resets == 0
    assert len(set(delivered)) == len(delivered), "an event was delivered twice"
    assert delivered == history[: len(delivered)], "the watch differs from etcd's own history"
    assert set(flow.acknowledged) <= set(history), "etcd lost a write that it acknowledged"
    print(f"{len(flow.acknowledged)} writes acknowledged, {len(delivered)} events delivered once")


def config(*endpoints: str, timeout_s: float = 10) -> EtcdConfig:
    return EtcdConfig(
        endpoints=endpoints, timeout_s=timeout_s, attempt_timeout_s=1.0, silence_s=1.0
    )


@pytest.mark.long
async def test_a_watch_delivers_each_event_once_over_restarts_of_etcd(single: Cluster) -> None:
    """etcd is killed and restarted three times during writes."""
    supervisor, (etcd,) = single
    async with (
        EtcdClient(config(etcd.endpoint)) as client,
        traffic(client) as flow,
    ):
        for _ in range(3):
            etcd.process.kill()
            await asyncio.to_thread(etcd.process.wait)
            (etcd,) = await asyncio.to_thread(start_members, supervisor.spawn, [etcd.member])
            await flow.more(50)


@pytest.mark.long
async def test_calls_continue_when_one_of_three_endpoints_is_killed(three: Cluster) -> None:
    """The watch continues as well, over another endpoint."""
    _, members = three
    async with (
        EtcdClient(config(*(each.endpoint for each in members))) as client,
        traffic(client) as flow,
    ):
        members[0].process.kill()
        await flow.more(50, limit_s=8)


@pytest.mark.long
async def test_calls_continue_when_one_of_three_endpoints_hangs(three: Cluster) -> None:
    """The client changes to another endpoint within seconds, although connections to the one that
    hangs stay open."""
    _, members = three
    async with (
        EtcdClient(config(*(each.endpoint for each in members))) as client,
        traffic(client) as flow,
    ):
        members[0].process.send_signal(signal.SIGSTOP)
        await flow.more(50, limit_s=8)
        members[0].process.send_signal(signal.SIGCONT)
        await flow.more(50)


@pytest.mark.long
async def test_calls_continue_after_the_only_endpoint_has_hung(single: Cluster) -> None:
    """The halt is longer than the limits of a silence and of one attempt."""
    _, (etcd,) = single
    async with (
        EtcdClient(config(etcd.endpoint)) as client,
        traffic(client) as flow,
    ):
        etcd.process.send_signal(signal.SIGSTOP)
        # Time itself is tested: longer than silence_s and attempt_timeout_s.
        await asyncio.sleep(2.5)
        etcd.process.send_signal(signal.SIGCONT)
        await flow.more(50)


@pytest.mark.long
async def test_calls_continue_after_a_partition(single: Cluster) -> None:
    """The network drops all data silently, or breaks the connections."""
    _, (etcd,) = single
    async with (
        open_gate(etcd.endpoint) as gate,
        EtcdClient(config(gate.endpoint)) as client,
        traffic(client) as flow,
    ):
        for interrupt in (gate.silence, gate.cut):
            interrupt()
            # Time itself is tested: longer than silence_s and attempt_timeout_s.
            await asyncio.sleep(1.5)
            gate.restore()
            await flow.more(50)


@pytest.mark.long
async def test_a_hung_connection_is_replaced(single: Cluster) -> None:
    """The only endpoint no longer answers on this connection, but on a new one."""
    _, (etcd,) = single
    async with (
        open_gate(etcd.endpoint) as gate,
        EtcdClient(config(gate.endpoint)) as client,
        traffic(client) as flow,
    ):
        gate.hang()
        await flow.more(50, limit_s=6)
        gate.hang()
        await flow.more(50, limit_s=6)


@pytest.mark.long
async def test_calls_fail_without_a_quorum_of_etcd_and_pass_with_one(three: Cluster) -> None:
    """Two of three members are halted, and then one of them continues."""
    _, members = three
    async with EtcdClient(config(*(each.endpoint for each in members))) as client:
        await client.put(PREFIX + "a", b"1")
        for member in members[1:]:
            member.process.send_signal(signal.SIGSTOP)
        async with EtcdClient(config(members[0].endpoint, timeout_s=2)) as short:
            async with asyncio.timeout(8):
                # A halt takes effect a moment after the signal: until then reads pass.
                with pytest.raises(Unavailable, match="no etcd answered"):
                    while True:
                        await short.get(PREFIX + "a")
        members[1].process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(8):
            assert await client.get(PREFIX + "a") is not None


async def test_a_watch_cut_off_over_a_compaction_delivers_the_current_keys(single: Cluster) -> None:
    """A key that was deleted meanwhile is not among them."""
    _, (etcd,) = single
    async with (
        open_gate(etcd.endpoint) as gate,
        EtcdClient(config(gate.endpoint)) as cut_off,
        EtcdClient(config(etcd.endpoint)) as client,
    ):
        await client.put(PREFIX + "goes", b"1")
        before = await client.put(PREFIX + "stays", b"2")
        async with aclosing(cut_off.watch(PREFIX, before)) as watch:
            assert (await anext(watch)).revision == before
            gate.cut()
            await client.delete(PREFIX + "goes")
            await client.put(PREFIX + "brief", b"3")
            await client.delete(PREFIX + "brief")
            after = await client.put(PREFIX + "comes", b"4")
            await compact_etcd(etcd.endpoint, after)
            gate.restore()
            async with asyncio.timeout(10):
                batch = await anext(watch)
            assert batch.reset
            assert [(event.kind, event.key, event.value) for event in batch.events] == [
                (EventKind.PUT, PREFIX + "comes", b"4"),
                (EventKind.PUT, PREFIX + "stays", b"2"),
            ]
            last = await client.put(PREFIX + "stays", b"5")
            async with asyncio.timeout(10):
                batch = await anext(watch)
            assert (batch.revision, batch.reset) == (last, False)


async def test_a_mirror_cut_off_over_a_compaction_has_the_current_keys(single: Cluster) -> None:
    """The mirror also continues over a restart of etcd."""
    supervisor, (etcd,) = single
    async with (
        open_gate(etcd.endpoint) as gate,
        EtcdClient(config(gate.endpoint)) as cut_off,
        EtcdClient(config(etcd.endpoint)) as client,
    ):
        await client.put(PREFIX + "goes", b"1")
        await client.put(PREFIX + "stays", b"2")
        gone: list[str] = []
        changed = asyncio.Event()
        async with PrefixMirror(
            cut_off,
            PREFIX,
            lambda item: item.value,
            on_delete=lambda name, old: gone.append(name),
            on_change=changed.set,
        ) as mirror:
            gate.cut()
            await client.delete(PREFIX + "goes")
            after = await client.put(PREFIX + "comes", b"3")
            await compact_etcd(etcd.endpoint, after)
            changed.clear()
            gate.restore()
            async with asyncio.timeout(10):
                await changed.wait()
            assert dict(mirror.records) == {"stays": b"2", "comes": b"3"}
            assert gone == ["goes"]
            etcd.process.kill()
            await asyncio.to_thread(etcd.process.wait)
            await asyncio.to_thread(start_members, supervisor.spawn, [etcd.member])
            changed.clear()
            await client.put(PREFIX + "stays", b"4")
            async with asyncio.timeout(20):
                await changed.wait()
            assert dict(mirror.records) == {"stays": b"4", "comes": b"3"}


async def test_a_watch_of_an_etcd_that_lost_its_data_fails(single: Cluster) -> None:
    """The watch raises CorruptError: its revision is ahead of etcd's, and it would wait for
    ever."""
    supervisor, (etcd,) = single
    async with EtcdClient(config(etcd.endpoint)) as client:
        start = await client.put(PREFIX + "a", b"1")
        async with aclosing(client.watch(PREFIX, start)) as watch:
            await anext(watch)
            etcd.process.kill()
            await asyncio.to_thread(etcd.process.wait)
            shutil.rmtree(etcd.member.data_directory)
            await asyncio.to_thread(start_members, supervisor.spawn, [etcd.member])
            async with asyncio.timeout(10):
                with pytest.raises(CorruptError, match="lost history"):
                    await anext(watch)


async def test_a_transaction_of_unknown_outcome_is_not_sent_again(single: Cluster) -> None:
    """The error states that the outcome is unknown; the transaction ran at most once."""
    _, (etcd,) = single
    async with (
        open_gate(etcd.endpoint) as gate,
        EtcdClient(config(gate.endpoint, timeout_s=2)) as cut_off,
        EtcdClient(config(etcd.endpoint)) as client,
    ):
        key = PREFIX + "a"
        await cut_off.get(key)
        gate.silence()
        with pytest.raises(RetryError, match="outcome of a transaction is unknown") as caught:
            await cut_off.transact((), (Put(key, b"1"),))
        assert caught.value.details["outcome"] == "unknown"
        gate.restore()
        async with asyncio.timeout(10):
            # A call that may be repeated replaces the broken connection.
            await cut_off.get(key)
            made = await cut_off.transact((absent(key + "b"),), (Put(key + "b", b""),))
        assert made.succeeded
        item = await client.get(key)
        assert item is None or item.version == 1


async def test_a_transaction_waits_for_an_etcd_that_starts(single: Cluster) -> None:
    """The transaction is not sent while etcd is down, and then runs once."""
    supervisor, (etcd,) = single
    key = PREFIX + "a"
    async with EtcdClient(config(etcd.endpoint, timeout_s=20)) as client:
        await client.get(key)
        etcd.process.kill()
        await asyncio.to_thread(etcd.process.wait)
        with pytest.raises(Unavailable):
            async with EtcdClient(config(etcd.endpoint, timeout_s=1)) as hasty:
                await hasty.transact((), (Put(key, b"0"),))
        waiting = asyncio.create_task(client.transact((absent(key),), (Put(key, b"1"),)))
        await asyncio.to_thread(start_members, supervisor.spawn, [etcd.member])
        assert (await waiting).succeeded
        item = await client.get(key)
        assert item is not None
        assert item.version == 1
