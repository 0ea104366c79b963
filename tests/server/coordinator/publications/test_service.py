"""The WeightSeries service over real gRPC, with a store in memory and fake segment servers."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
import pytest
from support.clusters.hooked_store import HookedStore, Transaction, answer_lost
from support.clusters.segment_stores import SegmentStore

from shoal_client.cli import parse
from shoal_client.connection.coordinators import Coordinators
from shoal_client.weights import publisher as publisher_module
from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.stores import WeightStores
from shoal_client.weights.watch import SeriesWatch
from shoal_proto.errors import (
    AccessDenied,
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidSpec,
    MalformedMessage,
    NoServers,
    NotLeader,
    Overloaded,
    PublicationAbandoned,
    Regressed,
    SeriesHeld,
    ShoalError,
    StaleEpoch,
    Unavailable,
    UnknownSeries,
    VersionGone,
)
from shoal_proto.segments.sealed import SegmentWriter
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_proto.v1.weights_pb2_grpc import (
    WeightSeriesStub,
    add_WeightSeriesServicer_to_server,
)
from shoal_server.coordinator.plug_in.interface import PublishedCut
from shoal_server.coordinator.publications import service as service_module
from shoal_server.coordinator.publications.service import PublishCut, WeightSeriesService
from shoal_server.coordinator.publications.stores import Stores
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.core.publications.limits import HELD_S
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Delete, Put, TransactionResult, created_at
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.rpc import bind, new_server

SERIES = "rl/policy"
T = TypeVar("T")


class Store(HookedStore):
    """A store that may lose a write's request, or its answer after it took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: list[str] = []
        """Losses for the next writes: "request", "answer" or none."""
        self._lost = ""

    async def before(self, transaction: Transaction) -> None:
        is_write = any(isinstance(each, Put | Delete) for each in transaction.then)
        self._lost = self.loses.pop(0) if self.loses and is_write else ""
        if self._lost == "request":
            raise Unavailable("the request was lost", details={"outcome": "unknown"})

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if self._lost:
            raise answer_lost()


async def without_tables(job: str, request_to: object) -> PublishedCut:
    """Replace the parameter servers' cuts: these jobs have no shards."""
    raise Unavailable(f"job {job} has no shards")


@dataclass
class World:
    store: Store = field(default_factory=Store)
    now_s: float = 1_000_000.0
    members: set[str] = field(default_factory=lambda: {"one"})
    jobs: set[str] = field(default_factory=lambda: {"rl"})
    leads: bool = False
    num_terms: int = 0
    publish_cut: PublishCut = without_tables

    async def authorize(self, token: Token) -> None:
        if token.incarnation not in self.members:
            raise Fenced("no member")

    def require_leading(self) -> None:
        if not self.leads:
            raise NotLeader("this coordinator does not lead", details={"leader": ""})

    def on_deposed(self, reason: str) -> None:
        self.leads = False

    async def take_leadership(self) -> tuple[Compare, ...]:
        """Begin a new term, and return the condition that its writes carry."""
        self.num_terms += 1
        await self.store.delete(keys.LEADER)
        put = Put(keys.LEADER, str(self.num_terms).encode())
        return (created_at(keys.LEADER, (await self.store.transact((), (put,))).revision),)

    @asynccontextmanager
    async def leading(self, call_wait_s: float = 60.0) -> AsyncIterator["Client"]:
        """Run one coordinator's term."""
        conditions = await self.take_leadership()
        calls = ServerCalls()
        service = WeightSeriesService(
            LeaderStore(self.store, lambda: conditions, self.on_deposed),
            calls,
            self.publish_cut,
            authorize=self.authorize,
            require_leading=self.require_leading,
            is_job=lambda job: job in self.jobs,
            clock=lambda: self.now_s,
            call_wait_s=call_wait_s,
        )
        server = new_server()
        address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
        add_WeightSeriesServicer_to_server(service, server)
        await server.start()
        self.leads = True
        try:
            async with AsyncExitStack() as term, grpc.aio.insecure_channel(address) as channel:
                await term.enter_async_context(service.leading())
                yield Client(WeightSeriesStub(channel), service, address, term)
        finally:
            self.leads = False
            await server.stop(None)
            await calls.close()


@dataclass
class Client:
    stub: WeightSeriesStub
    service: WeightSeriesService
    address: str
    term: AsyncExitStack
    """Ends the coordinator's term when it is closed; at the latest with `World.leading`."""

    async def call(self, made: Awaitable[T]) -> T:
        try:
            return await made
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "it") from None

    async def begin(self, publisher: pb.Publisher, **more: object) -> pb.BeginPublicationReply:
        request = pb.BeginPublicationRequest(
            **{"publisher": publisher, "series": SERIES, "world": 1} | more  # type: ignore[arg-type]
        )
        return await self.call(self.stub.Begin(request))  # type: ignore[return-value, arg-type]

    async def contribute(self, request: pb.ContributePartRequest) -> pb.VersionRecord:
        reply = await self.call(self.stub.Contribute(request))  # type: ignore[arg-type]
        return reply.version  # type: ignore[attr-defined, no-any-return]

    async def view(self, series: str = SERIES) -> pb.SeriesView:
        stream = self.stub.Watch(pb.WatchSeriesRequest(series=series))
        async for view in stream:  # type: ignore[attr-defined]
            return view  # type: ignore[no-any-return]
        raise AssertionError("no view")

    async def report(self, reader: str = "r", **more: object) -> pb.ReaderReportReply:
        request = pb.ReaderReport(**{"series": SERIES, "reader": reader} | more)  # type: ignore[arg-type]
        return await self.call(self.stub.Report(request))  # type: ignore[return-value, arg-type]


def member(generation: int = 1, incarnation: str = "one") -> pb.Publisher:
    token = Token(job="rl", member_id="m", incarnation=incarnation, generation=generation)
    return pb.Publisher(token=token)


def script(incarnation: str) -> pb.Publisher:
    return pb.Publisher(incarnation=incarnation)


def part(
    publication: int,
    *,
    epoch: int = 1,
    rank: int = 0,
    world: int = 1,
    publisher: pb.Publisher | None = None,
    holders: Sequence[str] = ("s1", "s2"),
    rows: tuple[int, int] | None = None,
    content: str = "",
    series: str = SERIES,
) -> pb.ContributePartRequest:
    """Return one rank's part: rows of an 8 x 4 float32 matrix, by default an equal share."""
    start, stop = rows or (8 * rank // world, 8 * (rank + 1) // world)
    num_bytes = (stop - start) * 16
    layout = pb.Layout(
        tensors=[pb.TensorSpec(name="w", dtype="float32", shape=[8, 4])],
        slices=[pb.Slice(tensor=0, offsets=[start, 0], sizes=[stop - start, 4], segment=rank)],
        segment_bytes=[num_bytes],
    )
    digest = hashlib.md5(f"{content or publication} {epoch} {rank}".encode()).digest()
    return pb.ContributePartRequest(
        publisher=publisher or member(),
        series=series,
        epoch=epoch,
        publication=publication,
        rank=rank,
        world=world,
        segment=pb.Segment(digest=digest, num_bytes=num_bytes, holders=holders),
        layout=layout,
        step=10 * publication,
        metadata={"loss": "0.5"},
    )


@pytest.fixture
async def world() -> AsyncIterator["WorldWithServers"]:
    found = WorldWithServers()
    async with AsyncExitStack() as stack:
        for name in ("s1", "s2"):
            found.servers[name] = await stack.enter_async_context(
                SegmentStore(name).serving(found.store)
            )
        yield found


@dataclass
class WorldWithServers(World):
    servers: dict[str, SegmentStore] = field(default_factory=dict)

    def put(self, request: pb.ContributePartRequest) -> pb.ContributePartRequest:
        """Store the part's segment on the holders that the part names."""
        for holder in request.segment.holders:
            self.servers[holder].held.add(request.segment.digest)
        return request

    async def published(self, client: Client, *publications: int) -> pb.VersionRecord:
        """Publish them as one rank in epoch 1, and return the newest version."""
        await client.begin(member())
        for publication in publications:
            version = await client.contribute(self.put(part(publication)))
        return version


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


async def test_a_publication_becomes_a_version_once_every_rank_has_contributed(
    world: WorldWithServers,
) -> None:
    """Versions are numbered from 1 and have their segments in the order of ranks; when the callers
    are answered, the version is in etcd."""
    async with world.leading() as client:
        begun = [await client.begin(member(), rank=rank, world=2) for rank in range(2)]
        assert [(each.epoch, each.head) for each in begun] == [(1, 0), (1, 0)]
        assert [[s.id for s in each.servers] for each in begun] == [["s1", "s2"], ["s2", "s1"]]
        parts = [world.put(part(1, rank=rank, world=2)) for rank in range(2)]
        first = asyncio.create_task(client.contribute(parts[1]))
        await until(lambda: _waits(client))
        assert (await client.view()).head == 0
        second = await client.contribute(parts[0])
        assert await first == second
        assert (second.number, second.epoch, second.step) == (1, 1, 10)
        assert [s.digest for s in second.segments] == [p.segment.digest for p in parts]
        assert dict(second.metadata) == {"loss": "0.5"}
        stored = await world.store.get(keys.series_version(SERIES, 1))
        assert stored is not None and pb.VersionRecord.FromString(stored.value) == second
        layout = await client.call(
            client.stub.GetLayout(  # type: ignore[arg-type]
                pb.GetLayoutRequest(series=SERIES, layout_digest=second.layout_digest)
            )
        )
        assert [list(each.offsets) for each in layout.slices] == [[0, 0], [4, 0]]  # type: ignore[attr-defined]
        content = second.layout_digest + b"".join(s.digest for s in second.segments)
        assert second.digest == hashlib.sha256(content).digest()
        view = await client.view()
        assert (view.head, list(view.versions)) == (1, [second])
        assert [each.id for each in view.servers] == ["s1", "s2"]


async def _waits(client: Client) -> bool:
    """True once a part waits for others."""
    return not client.service.series()[0].series.is_idle


async def test_a_repeated_part_is_answered_with_its_version(world: WorldWithServers) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
        assert (await client.contribute(part(2))).number == 2
        assert (await client.contribute(part(1))).number == 1
        with pytest.raises(InvalidSpec, match="committed with another part"):
            await client.contribute(part(2, content="other"))
    async with world.leading() as client:
        assert (await client.contribute(part(2))).number == 2
        assert (await client.view()).head == 2


@pytest.mark.parametrize("lost", [["answer"], ["request"], ["request", "answer"]])
async def test_a_write_of_unknown_outcome_is_made_once(
    world: WorldWithServers, lost: list[str]
) -> None:
    async with world.leading() as client:
        await world.published(client, 1)
        world.store.loses = lost
        assert (await client.contribute(world.put(part(2)))).number == 2
        view = await client.view()
        assert [each.number for each in view.versions] == [1, 2] and not world.store.loses


async def test_a_layout_that_etcd_refuses_ends_its_publication_alone(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(transaction: Transaction) -> None:
        if any(put.key.startswith(keys.SERIES_LAYOUTS) for put in transaction.puts):
            raise MalformedMessage("the request is too large")

    async with world.leading(call_wait_s=2.0) as client:
        await client.begin(member())
        with monkeypatch.context() as patch, pytest.raises(MalformedMessage, match="too large"):
            patch.setattr(world.store, "before", refuse)
            await client.contribute(world.put(part(1)))
        assert (await client.contribute(world.put(part(2)))).number == 1


async def test_a_series_that_another_process_wrote_ends_with_advice(
    world: WorldWithServers,
) -> None:
    """Calls that wait, and later ones, raise the whole error."""
    async with world.leading() as client:
        await world.published(client, 1)
        head = await world.store.get(keys.series_head(SERIES))
        assert head is not None
        await world.store.put(head.key, head.value)
        with pytest.raises(InternalError, match="changed by another process") as raised:
            await client.contribute(world.put(part(2)))
        assert raised.value.expected == "the head that this coordinator has written"
        assert raised.value.fix == "Try again: the record is then read again."


async def refused_write(
    world: "WorldWithServers", client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publish a version, and end the series by etcd's refusal of the next one."""

    async def refuse(transaction: Transaction) -> None:
        if any(put.key == keys.series_head(SERIES) for put in transaction.puts):
            raise MalformedMessage("the request is too large")

    await world.published(client, 1)
    with monkeypatch.context() as patch, pytest.raises(MalformedMessage, match="too large"):
        patch.setattr(world.store, "before", refuse)
        await client.contribute(world.put(part(2)))


async def test_a_series_that_ended_is_removed_with_its_job(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.leading() as client:
        await refused_write(world, client, monkeypatch)
        assert await client.service.clear("rl", forgets_numbers=True)
        assert await world.store.keys(keys.SERIES) == ()


async def test_a_series_that_ended_is_read_again_and_stays_listed(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is so too if the cluster has its maximum of series."""
    monkeypatch.setattr(service_module, "MAINTAIN_EACH_S", 0.01)
    monkeypatch.setattr(service_module, "MAX_SERIES", 1)

    async def is_read_again() -> bool:
        reply = await client.call(client.stub.List(pb.ListSeriesRequest(job="rl")))  # type: ignore[arg-type]
        assert [each.series for each in reply.series] == [SERIES]  # type: ignore[attr-defined]
        return client.service.series()[0].ended is None

    async with world.leading() as client:
        await refused_write(world, client, monkeypatch)
        await until(is_read_again)
        assert await client.service.clear("rl", forgets_numbers=True)
        assert await world.store.keys(keys.SERIES) == ()


async def test_a_reader_outlasts_the_end_of_a_series_that_is_read_again(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does if etcd denies the coordinator access for a while."""
    is_denied = asyncio.Event()

    async def deny(prefix: str) -> NoReturn:
        is_denied.set()
        raise AccessDenied("etcd denies access")

    async with world.leading() as client:
        with (
            closing(Coordinators([client.address])) as coordinators,
            closing(SeriesWatch(coordinators, SERIES)) as watch,
            monkeypatch.context() as patch,
        ):
            await asyncio.to_thread(watch.newest, -1, 10.0)
            patch.setattr(world.store, "range", deny)
            await refused_write(world, client, monkeypatch)
            await asyncio.wait_for(is_denied.wait(), 10.0)
            patch.undo()
            assert (await client.contribute(world.put(part(3)))).number == 2
            assert (await asyncio.to_thread(watch.newest, 1, 10.0)).head == 2


async def test_servers_are_asked_although_one_leaves_the_mirror(world: WorldWithServers) -> None:
    """The record of a server may be dropped between the choice of servers and the first call."""
    world.servers["s1"].held.add(b"d")
    calls, store = ServerCalls(), LeaderStore(world.store, tuple, world.on_deposed)
    stores = Stores(store, calls, lambda: None)
    async with AsyncExitStack() as stack, stores.mirror:
        stack.push_async_callback(calls.close)
        await stores.mirror.wait_in_sync()
        asked = asyncio.create_task(stores.query_holders(SERIES, {"s1": [b"d"]}))
        asyncio.get_running_loop().call_soon(stores.mirror.forget, "s1")
        ((server, _, answer),) = await asked
        assert server.server_id == "s1" and answer.held == {b"d"}


async def test_servers_keep_a_publication_while_tables_are_copied(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that have been copied early, and the publisher's own part, wait for the last shard
    longer than servers keep segments that no version names."""
    monkeypatch.setattr(service_module, "RENEW_EACH_S", 0.01)

    async def copied(job: str, request_to: object) -> PublishedCut:
        async def are_renewed() -> bool:
            return all((1, 3) in each.renewed for each in world.servers.values())

        await until(are_renewed)
        layout = ShardMap(job=job)
        return PublishedCut(segments=[], layout=layout, stamps=[], torn=[], pause_s=0.0)

    world.publish_cut = copied
    async with world.leading() as client:
        await client.begin(member())
        request = pb.CutTablesRequest(publisher=member(), series=SERIES, epoch=1, publication=3)
        await client.call(client.stub.CutTables(request))  # type: ignore[arg-type]


async def test_numbers_continue_under_the_next_leader_and_the_next_generation(
    world: WorldWithServers,
) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
    async with world.leading() as client:
        begun = await client.begin(member(generation=5))
        assert (begun.epoch, begun.head) == (2, 2)
        version = await client.contribute(
            world.put(part(1, epoch=2, publisher=member(generation=5)))
        )
        assert (version.number, version.epoch) == (3, 2)


async def test_a_replaced_publisher_publishes_nothing_more(world: WorldWithServers) -> None:
    """The open publication of the replaced publisher is discarded."""
    async with world.leading() as client:
        await client.begin(member(), world=2)
        waiting = asyncio.create_task(client.contribute(world.put(part(1, world=2))))
        await until(lambda: _waits(client))
        await client.begin(member(generation=2))
        with pytest.raises(StaleEpoch, match="replaced"):
            await waiting
        with pytest.raises(StaleEpoch, match="replaced"):
            await client.contribute(world.put(part(2)))
        with pytest.raises(StaleEpoch, match="later generation"):
            await client.begin(member(generation=1))
        assert (await client.view()).head == 0
        world.members.clear()
        with pytest.raises(Fenced):
            await client.begin(member(generation=3))


async def test_parts_that_do_not_cover_each_element_once_make_no_version(
    world: WorldWithServers,
) -> None:
    """The error names the tensor to all ranks; the next publication is not affected."""
    async with world.leading() as client:
        await client.begin(member(), world=2)
        for number, rows, message in ((1, (5, 8), "not whole"), (2, (3, 8), "elements twice")):
            parts = [
                world.put(part(number, world=2)),
                world.put(part(number, rank=1, world=2, rows=rows)),
            ]
            outcomes = await asyncio.gather(*map(client.contribute, parts), return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, PublicationAbandoned) and message in outcome.what
                assert "tensor w" in outcome.what
        with pytest.raises(PublicationAbandoned, match="not whole"):
            await client.contribute(part(1, world=2))
        parts = [world.put(part(3, rank=rank, world=2)) for rank in range(2)]
        versions = await asyncio.gather(*map(client.contribute, parts))
        assert [each.number for each in versions] == [1, 1]


async def test_a_segment_that_no_server_has_makes_no_version(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication is abandoned if no server has the segment of a part. If some of the named
    holders have it, the version's record names only these."""
    async with world.leading() as client:
        await client.begin(member())
        with pytest.raises(PublicationAbandoned, match="no server has the segment of rank 0"):
            await client.contribute(part(1))
        request = world.put(part(2))
        world.servers["s2"].held.clear()
        version = await client.contribute(request)
        assert version.number == 1 and list(version.segments[0].holders) == ["s1"]


async def test_a_leased_version_is_kept_and_a_dropped_one_is_gone(world: WorldWithServers) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
        answer = await client.report(leased=[1, 7])
        assert (list(answer.leased), list(answer.gone), answer.head) == ([1], [7], 2)
        assert [v.number for v in (await client.view()).versions] == [1, 2]
        await client.contribute(world.put(part(3)))
        # Leased versions count towards the number of versions kept.
        assert [v.number for v in (await client.view()).versions] == [1, 3]
        assert list((await client.report(leased=[1])).leased) == [1]
        await client.report(leased=[])
        await client.contribute(world.put(part(4)))
        assert [v.number for v in (await client.view()).versions] == [3, 4]
        assert list((await client.report(leased=[1])).gone) == [1]
        assert (await world.store.get(keys.series_version(SERIES, 1))) is None


async def test_a_lease_that_is_not_renewed_ends(world: WorldWithServers) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
        await client.report(leased=[1])
        world.now_s += HELD_S - 1
        await client.contribute(world.put(part(3)))
        assert [v.number for v in (await client.view()).versions] == [1, 3]
        world.now_s += 2
        await client.contribute(world.put(part(4)))
        assert [v.number for v in (await client.view()).versions] == [3, 4]


async def test_a_new_leader_drops_nothing_until_leases_of_the_last_term_have_ended(
    world: WorldWithServers,
) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
        await client.report(leased=[1])
    async with world.leading() as client:
        world.now_s += HELD_S - 1
        await client.contribute(world.put(part(3)))
        assert [v.number for v in (await client.view()).versions] == [1, 2, 3]
        world.now_s += 2
        await client.contribute(world.put(part(4)))
        assert [v.number for v in (await client.view()).versions] == [3, 4]


async def test_a_leader_that_was_deposed_grants_no_lease(world: WorldWithServers) -> None:
    """The successor would not know of the lease."""
    async with world.leading() as client:
        await world.published(client, 1)
        await world.take_leadership()
        with pytest.raises(NotLeader):
            await client.report(leased=[1])


async def test_a_reader_that_reports_an_earlier_version_is_refused(world: WorldWithServers) -> None:
    async with world.leading() as client:
        version = await world.published(client, 1, 2)
        await client.report(installed=2, installed_digest=version.digest)
        with pytest.raises(Regressed, match="went back"):
            await client.report(installed=1)
        # A new process of the same engine has nothing installed.
        await client.report(installed=0)


async def test_a_reader_with_other_bytes_is_listed(world: WorldWithServers) -> None:
    async with world.leading() as client:
        version = await world.published(client, 1)
        await client.report("good", installed=1, installed_digest=version.digest)
        await client.report("bad", installed=1, installed_digest=b"other", fetch_s=0.5)
        reply = await client.call(client.stub.List(pb.ListSeriesRequest()))  # type: ignore[arg-type]
        (view,) = reply.series  # type: ignore[attr-defined]
        assert {each.id: each.differs for each in view.readers} == {"good": False, "bad": True}


async def test_a_script_holds_its_series_until_its_lease_ends(world: WorldWithServers) -> None:
    series = "svc/ranker"
    async with world.leading() as client:
        first = await client.begin(script("a"), series=series)
        assert first.epoch == 1 and first.lease_s > 0
        version = await client.contribute(world.put(part(1, publisher=script("a"), series=series)))
        assert version.number == 1
        with pytest.raises(SeriesHeld, match="held by a script"):
            await client.begin(script("b"), series=series)
        await client.begin(script("a"), series=series, ending=True)
        assert (await client.begin(script("b"), series=series)).epoch == 2
        with pytest.raises(StaleEpoch):
            await client.begin(script("a"), series=series, epoch=1)
        world.now_s += HELD_S + 1
        assert (await client.begin(script("c"), series=series)).epoch == 3
        with pytest.raises(SeriesHeld, match="only its members publish it"):
            await client.begin(script("a"))


async def test_a_pinned_version_is_kept_and_can_be_rolled_back_to(world: WorldWithServers) -> None:
    """A rollback is a new version with the old bytes; a repeated request makes it only once."""
    async with world.leading() as client:
        await world.published(client, 1)
        pin = pb.PinVersionRequest(series=SERIES, number=1)
        await client.call(client.stub.Pin(pin))  # type: ignore[arg-type]
        for publication in (2, 3, 4):
            await client.contribute(world.put(part(publication)))
        versions = {v.number: v for v in (await client.view()).versions}
        assert sorted(versions) == [1, 3, 4] and versions[1].pinned
        for _ in range(2):
            back = await client.call(
                client.stub.Rollback(pb.RollbackRequest(series=SERIES, to=1))  # type: ignore[arg-type]
            )
            assert (back.number, back.rolled_back_to) == (5, 1)  # type: ignore[attr-defined]
            assert back.digest == versions[1].digest  # type: ignore[attr-defined]
        with pytest.raises(VersionGone, match="not kept"):
            await client.call(client.stub.Rollback(pb.RollbackRequest(series=SERIES, to=2)))  # type: ignore[arg-type]
        await client.call(
            client.stub.Pin(pb.PinVersionRequest(series=SERIES, number=1, unpin=True))  # type: ignore[arg-type]
        )
        assert (await client.contribute(world.put(part(5)))).number == 6
        assert [v.number for v in (await client.view()).versions] == [5, 6]


async def test_the_command_lists_pins_and_rolls_back(
    world: WorldWithServers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status of `list` is 1 if a reader has installed other bytes than were published."""
    monkeypatch.setenv("COLUMNS", "160")

    async def shoal(*arguments: str) -> tuple[int, str]:
        run = parse(("weights", *arguments, "--coordinator", client.address))
        capsys.readouterr()  # the log of the service
        status = await asyncio.to_thread(run)
        shown = capsys.readouterr().out.splitlines(keepends=True)
        return status, "".join(line for line in shown if not line.startswith("20"))

    async with world.leading() as client:
        assert await shoal("list") == (0, "no published weights\n")
        version = await world.published(client, 1, 2)
        await client.report("engine", installed=2, installed_digest=version.digest, leased=[2])
        status, shown = await shoal("list", SERIES)
        digest = version.digest.hex()[:12]
        assert status == 0 and shown.count(digest) == 2
        assert shown.startswith("rl/policy: version 2, by generation 1, keeps 2 in 2 copies\n")
        assert await shoal("pin", SERIES, "1") == (
            0,
            "version 1 of rl/policy is kept until it is unpinned or the job is removed\n",
        )
        assert "pinned" in (await shoal("list", "rl"))[1]
        assert await shoal("unpin", SERIES, "1") == (
            0,
            "version 1 of rl/policy is kept like any other\n",
        )
        assert await shoal("rollback", SERIES, "--to", "1") == (
            0,
            "version 3 of rl/policy has the bytes of version 1\n",
        )
        await client.report("engine", installed=3, installed_digest=version.digest)
        status, shown = await shoal("list", SERIES)
        assert status == 1 and "engine serves other bytes than version 3 has" in shown
        status, shown = await shoal("list", SERIES, "--json")
        assert status == 1 and '"differs": true' in shown
        with pytest.raises(UnknownSeries, match="rl/other"):
            await shoal("list", "rl/other")


@pytest.mark.parametrize(
    "arguments",
    [
        ("pin", "rl/policy"),
        ("pin", "policy", "1"),
        ("rollback", "rl/policy", "1"),
        ("list", "a/b/c"),
        ("pin", "rl/policy", str(2**70)),
        ("rollback", "rl/policy", "--to", str(2**70)),
        ("export", "rl/policy", str(2**70), "--into", "there"),
        ("export", "rl/policy"),
        ("pin", "rl/pölicy", "1"),
        ("pin", f"rl/{'p' * 129}", "1"),
    ],
)
def test_a_command_with_missing_or_invalid_arguments_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSpec):
        parse(("weights", *arguments))()


async def test_a_watcher_sees_each_change_and_the_end_of_the_term(world: WorldWithServers) -> None:
    """A watch may begin before the first publisher does."""
    heads: list[int] = []
    ended: list[ShoalError] = []

    async def watch(client: Client) -> None:
        try:
            async for view in client.stub.Watch(pb.WatchSeriesRequest(series=SERIES)):  # type: ignore[attr-defined]
                heads.append(view.head)
        except grpc.aio.AioRpcError as error:
            ended.append(from_rpc_error(error, "it"))

    async with world.leading() as client:
        watching = asyncio.create_task(watch(client))
        await until(lambda: _truth(heads == [0]))
        await world.published(client, 1)
        await until(lambda: _truth(heads[-1] == 1))
        await client.term.aclose()
        await watching
    assert isinstance(ended[0], NotLeader)


async def _truth(value: bool) -> bool:
    return value


@pytest.mark.long
async def test_the_segments_of_a_server_that_is_gone_are_copied_to_another(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version is lost once no server has its segment; its number is not used again."""
    monkeypatch.setattr(service_module, "MAINTAIN_EACH_S", 0.02)
    third = SegmentStore("s3")
    async with third.serving(world.store), world.leading() as client:
        version = await world.published(client, 1)
        await world.store.delete(keys.server("s2"))

        async def is_replaced() -> bool:
            world.now_s += 1.0
            (found,) = (await client.view()).versions
            return (
                list(found.segments[0].holders) == ["s1", "s3"] and found.digest == version.digest
            )

        await until(is_replaced)
        world.servers["s1"].held.clear()
        (address,) = [s.address for s in (await client.view()).servers if s.id == "s1"]
        await world.servers["s1"].register(world.store, address, incarnation="2")

        async def is_lost() -> bool:
            world.now_s += 1.0
            return list((await client.view()).lost) == [1]

        await until(is_lost)
        assert (await client.view()).head == 1
        assert (await client.contribute(world.put(part(2, holders=["s1"])))).number == 2


async def test_a_version_is_durable_once_every_holder_has_it_on_disk(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAINTAIN_EACH_S", 0.02)
    async with world.leading() as client:
        for server in world.servers.values():
            server.writes_to_disk = True
        version = await world.published(client, 1)
        world.servers["s1"].durable.add(version.segments[0].digest)
        await asyncio.sleep(0.2)
        assert not (await client.view()).versions[0].durable
        world.servers["s2"].durable.add(version.segments[0].digest)

        async def is_durable() -> bool:
            return (await client.view()).versions[0].durable

        await until(is_durable)


async def test_clearing_a_job_keeps_or_forgets_its_version_numbers(world: WorldWithServers) -> None:
    async with world.leading() as client:
        await world.published(client, 1, 2)
        assert await client.service.clear("rl", forgets_numbers=False)
        assert not await client.service.clear("rl", forgets_numbers=False)
        view = await client.view()
        assert (view.head, list(view.versions)) == (2, [])
        assert (await client.contribute(world.put(part(3)))).number == 3
        await client.service.clear("rl", forgets_numbers=True)
        assert (
            await world.store.keys(keys.SERIES),
            await world.store.keys(keys.SERIES_LAYOUTS),
        ) == (
            (),
            (),
        )


async def test_a_series_whose_removal_fails_is_removed_by_the_next(
    world: WorldWithServers,
) -> None:
    """The deletion of the records is lost, or only etcd's answer to it."""
    for lost in ("request", "answer"):
        async with world.leading() as client:
            await client.begin(member())
            world.store.loses = [lost]
            with pytest.raises(Unavailable):
                await client.service.clear("rl", forgets_numbers=True)
            await client.service.clear("rl", forgets_numbers=True)
            assert await world.store.keys(keys.SERIES) == ()
            assert client.service.series() == []


async def test_removed_series_leave_room_for_others(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of a removed series are kept, and do not count as a series."""
    monkeypatch.setattr(service_module, "MAX_SERIES", 1)
    async with world.leading() as client:
        await world.published(client, 1)
        with pytest.raises(Overloaded, match="`shoal rm JOB` removes the series of a job"):
            await client.begin(script("p"), series="other/policy")
        await client.service.clear("rl", forgets_numbers=False)
        assert (await client.begin(script("p"), series="other/policy")).epoch == 1


async def test_invalid_requests_are_refused_with_the_reason(world: WorldWithServers) -> None:
    async with world.leading(call_wait_s=0.1) as client:
        with pytest.raises(InvalidSpec, match="bad name of a series"):
            await client.begin(member(), series="policy")
        with pytest.raises(InvalidSpec, match="not belong to the publisher's job"):
            await client.begin(member(), series="other/policy")
        with pytest.raises(MalformedMessage, match="without a publisher"):
            await client.begin(pb.Publisher(), series="svc/x")
        with pytest.raises(InvalidSpec, match="bad rank"):
            await client.begin(member(), rank=1)
        with pytest.raises(UnknownSeries, match="no series rl/policy"):
            await client.call(client.stub.Pin(pb.PinVersionRequest(series=SERIES, number=1)))  # type: ignore[arg-type]
        await client.begin(member(), world=2)
        with pytest.raises(DeadlineExceeded, match="not committed yet"):
            await client.contribute(world.put(part(1, world=2)))
        with pytest.raises(MalformedMessage, match="incomplete part of a publication"):
            await client.contribute(part(0))


async def test_a_publication_without_servers_fails() -> None:
    async with World().leading() as client:

        def publish() -> None:
            own = SeriesPublisher([client.address], "svc/ranker", lambda: script("a"))
            with closing(own):
                part = SegmentWriter(4).seal()
                own.contribute(part, pb.Layout(), publication=1, timeout_s=0.1)

        with pytest.raises(NoServers, match="shoal ps"):
            await asyncio.to_thread(publish)


async def test_a_publication_ends_for_all_ranks_if_one_cannot_send_its_part(
    world: WorldWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others wait for it, and stop training at their third publication."""

    def put(stores: WeightStores, server: object, request: pb.PutSegmentRequest, *_: object) -> Any:
        if request.rank:
            raise Overloaded("the server has no memory left")
        return pb.PutSegmentReply(holders=world.servers)

    monkeypatch.setattr(WeightStores, "put", put)
    monkeypatch.setattr(publisher_module, "OVERLOADED_S", 0.1)
    async with world.leading() as client:

        def publish(rank: int) -> None:
            own = SeriesPublisher([client.address], SERIES, member, rank=rank, world=2)
            with closing(own):
                segment = SegmentWriter(4).seal()
                try:
                    own.contribute(segment, pb.Layout(), publication=1, timeout_s=10.0)
                except ShoalError as error:
                    own.report_failure(1, error)
                    raise

        ranks = (asyncio.to_thread(publish, rank) for rank in range(2))
        waiting, failed = await asyncio.gather(*ranks, return_exceptions=True)
    assert isinstance(failed, Overloaded)
    assert isinstance(waiting, PublicationAbandoned)
    assert "rank 1 could not send its part" in waiting.what and "no memory left" in waiting.seen


async def test_a_failure_before_a_ranks_first_part_ends_the_publication_for_all_ranks(
    world: WorldWithServers,
) -> None:
    """The coordinator knows nothing of this generation yet."""
    async with world.leading() as client:

        def fail() -> None:
            with closing(SeriesPublisher([client.address], SERIES, member, rank=1, world=2)) as own:
                own.report_failure(1, MemoryError("no memory left"))

        await asyncio.to_thread(fail)
        with pytest.raises(PublicationAbandoned, match="no memory left"):
            await client.contribute(world.put(part(1, world=2)))


async def test_a_script_keeps_its_series_while_its_only_server_restarts() -> None:
    """The lease is renewed without servers, too. They come back later than it would have ended."""
    world, server, series = World(), SegmentStore("s1"), "svc/ranker"
    async with world.leading() as client:

        async def renews(num_servers: int) -> bool:
            begun = await client.begin(script("a"), series=series, epoch=1)
            return len(begun.servers) == num_servers

        async with server.serving(world.store):
            await until(lambda: renews(1))
        for _ in range(2):
            await until(lambda: renews(0))
            world.now_s += HELD_S - 1
        with pytest.raises(SeriesHeld):
            await client.begin(script("b"), series=series)
        async with server.serving(world.store):
            await until(lambda: renews(1))
