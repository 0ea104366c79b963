"""Views of a coordinator and parameter servers, most of them through the status endpoint."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from support.clusters.coordinator_world import FIELDS, Served, entered, propose, served
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import ParameterServers
from support.processes.served_process import awaited

from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import ProposalConflict
from shoal_proto.incarnation import public_id
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.coordinator.parameters import samples_view
from shoal_server.core.samples.requests import EpochCounts, LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.api import RangeResult
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer
from shoal_server.status.shards import ShardReader
from shoal_server.status.views import ShardsView

WITHIN_S = 10.0


@asynccontextmanager
async def endpoint(
    store: MemoryStore | None = None,
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """Run a coordinator that leads, and a client of its status endpoint."""
    async with served(store or MemoryStore()) as world:
        app = build_app(world.coordinator.view, world.coordinator.board)
        async with (
            StatusServer(app, "127.0.0.1", 0) as server,
            httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
        ):
            yield world, http


class HeldStore(MemoryStore):
    """A store that does not answer while a job is read from it, after `holds` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = False
        self.goes_on = asyncio.Event()

    async def range(self, prefix: str) -> RangeResult:
        if self.holds and prefix == keys.members("j"):
            await self.goes_on.wait()
        return await super().range(prefix)


async def test_no_time_depends_on_the_setting_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host was suspended, or its clock was set: members that send heartbeats are seen just
    now."""
    async with endpoint() as (world, http):
        await world.training("a")
        seconds = time.time
        monkeypatch.setattr("time.time", lambda: seconds() + 8 * 3600)
        await asyncio.to_thread(world.client("b").join)
        why = (await http.get("/api/v1/jobs/j/members/a/why")).json()
        assert why["waiting_s"] < 3600
        job = (await http.get("/api/v1/jobs/j")).json()
        now_s = job["summary"]["now_unix_s"]
        assert 0 <= now_s - job["summary"]["begun_unix_s"] < 3600
        assert 0 <= now_s - job["members"][0]["member"]["last_seen_unix_s"] < 3600
        events = (await http.get("/api/v1/jobs/j/events")).json()["events"]
        assert all(0 <= now_s - each["unix_s"] < 3600 for each in events) and events
        metrics = (await http.get("/metrics")).text
        ages = [
            line for line in metrics.splitlines() if line.startswith("shoal_member_last_seen_age")
        ]
        assert len(ages) == 2
        assert all(float(age.split()[-1]) < 3600 for age in ages)


async def test_a_job_that_a_new_leader_still_reads_is_not_unknown() -> None:
    """The job is listed, and its details are to be had in a moment: no caller is told that there is
    no such job."""
    store = HeldStore()
    async with endpoint(store) as (world, _):
        (member,) = await world.training("a")
        await asyncio.to_thread(member.leave, completed=False, reason="an error")
    store.holds = True
    async with endpoint(store) as (world, http):
        (listed,) = (await http.get("/api/v1/jobs")).json()
        assert (listed["job"], listed["state"]) == ("j", "interrupted")
        for path in ("j", "j/generations", "j/events", "j/members/a/why"):
            answer = await http.get(f"/api/v1/jobs/{path}")
            assert (answer.status_code, answer.json()["kind"]) == (503, "Unavailable")
        assert (await http.get("/api/v1/jobs/other")).status_code == 404
        store.goes_on.set()
        while world.coordinator.registry.actor_if_known("j") is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await http.get("/api/v1/jobs/j")).status_code == 200


class HeldGenerations(MemoryStore):
    """A store that does not answer the first call for the generations of a job."""

    is_asked = False

    async def keys(self, prefix: str) -> tuple[str, ...]:
        if prefix == keys.generations("j") and not self.is_asked:
            self.is_asked = True
            await asyncio.Event().wait()
        return await super().keys(prefix)


async def test_a_new_leader_lists_the_generations_of_a_finished_job() -> None:
    """They are read once they are asked for, if that is before the leader has read them."""
    store = HeldGenerations()
    async with endpoint(store) as (world, http):
        (member,) = await world.training("a")
        await asyncio.to_thread(member.leave, completed=True, reason="done")
        (before,) = (await http.get("/api/v1/jobs/j/generations")).json()
        assert not store.is_asked
    async with endpoint(store) as (world, http):
        while not store.is_asked:  # noqa: ASYNC110 - by the leader's own reading
            await asyncio.sleep(0)
        assert (await http.get("/api/v1/jobs/j")).json()["summary"]["state"] == "finished"
        (listed,) = (await http.get("/api/v1/jobs/j/generations")).json()
        assert listed == before
        assert (await http.get("/api/v1/jobs/j/generations/1")).json() == before
        assert (await http.get("/api/v1/jobs/j/generations/2")).status_code == 404


@pytest.mark.long
async def test_training_members_are_shown_with_rank_and_generation() -> None:
    """The API also has the generation record, events, and what a member waits for."""
    async with endpoint() as (world, http):
        members = await world.training("a", "b")
        job = (await http.get("/api/v1/jobs/j")).json()
        assert (job["summary"]["phase"], job["summary"]["num_training"]) == ("running", 2)
        assert job["fields"] == FIELDS
        shown = {entry["member"]["member_id"]: entry["member"] for entry in job["members"]}
        assert {m["rank"] for m in shown.values()} == {0, 1}
        for member in members:
            token = member.token
            assert shown[token.member_id]["public_id"] == public_id(token.incarnation)
            assert shown[token.member_id]["generation"] == token.generation
        (record,) = (await http.get("/api/v1/jobs/j/generations")).json()
        assert record["verdict"] == "committed"
        why = (await http.get("/api/v1/jobs/j/members/a/why")).json()
        assert why["waiting_for"] == "nothing: it trains"
        events = (await http.get("/api/v1/jobs/j/events")).json()["events"]
        assert {"member_joined", "phase_running"} <= {event["kind"] for event in events}


@pytest.mark.long
async def test_a_waiting_member_is_shown_with_what_it_waits_for() -> None:
    """The job has one of two members, and is in the phase COLLECT."""
    async with endpoint() as (world, http):
        await world.joined("a", desired=2, low=2)
        why = (await http.get("/api/v1/jobs/j/members/a/why")).json()
    assert (why["phase"], why["state"]) == ("collect", "waiting")
    assert "member" in why["waiting_for"]
    assert 0 <= why["waiting_s"] < 60, "the coordinator's clock is Unix time"


async def test_a_joining_member_is_ready_once_it_trains() -> None:
    """A rolling update ends the next old worker once a new one is ready: one that still loads its
    model could not take the state over."""
    async with endpoint() as (world, http):
        path = "/api/v1/jobs/j/members/b/readyz"
        first, joining = await world.joined("a"), world.client("b")
        await asyncio.to_thread(joining.join)
        answer = await http.get(path)
        assert answer.status_code == 409
        assert answer.json()["waiting_for"] == "its own model: it has not proposed yet"
        await asyncio.to_thread(propose, joining)
        await asyncio.gather(entered(first, 0), entered(joining, 0))
        assert (await http.get(path)).status_code == 200


@pytest.mark.long
async def test_a_stopped_coordinator_is_not_ready() -> None:
    """The answer of /readyz is 503 with the reason once the coordinator has stepped down."""
    async with endpoint() as (world, http):
        assert (await http.get("/readyz")).status_code == 200
        await world.coordinator.step_down()
        response = await http.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reason"]


@pytest.mark.long
async def test_a_refused_joiner_is_in_the_events() -> None:
    """The members are those that train."""
    async with endpoint() as (world, http):
        await world.training("a", "b")
        stranger: MemberSession = world.client("c", desired=2)
        await asyncio.to_thread(stranger.join)
        with suppress(ProposalConflict):  # at once, or when it waits for its generation
            await asyncio.to_thread(propose, stranger, 0, {**FIELDS, "schema": "other"})
            await entered(stranger, 0)
        events = (await http.get("/api/v1/jobs/j/events")).json()["events"]
        members = (await http.get("/api/v1/jobs/j/members")).json()
    assert [e["member"]["member_id"] for e in members][:2] == ["a", "b"]
    assert any(event["member_id"] == "c" for event in events)


def in_step(servers: ParameterServers, reader: ShardReader) -> ShardsView | None:
    """Return the view if backups have answered, else None: they answer some milliseconds after a
    push counts as received."""
    view = servers.run(reader.read("job"))
    assert view is not None
    lags = {(len(shard.replication.copies), shard.replication.lag) for shard in view.shards}
    return view if lags == {(1, 0)} else None


def test_the_state_of_every_shard_is_read_from_its_server() -> None:
    """A stopped server is shown as such, and its shards as not created."""
    with ParameterServers(2) as servers:
        reader = ShardReader(servers.store)
        token = servers.admit("w0")
        client = ParameterClient([servers.coordinator], lambda: token, timeout_s=20.0)
        size = 900_000
        client.place([ParameterSpec(name="w", shape=(size,), dtype="float32")])
        sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
        zeros = {"w": memoryview(array("f", [0.0]) * size).cast("B")}
        client.create(sgd, zeros)
        client.pull(zeros)
        client.push(zeros)
        view = awaited(lambda: in_step(servers, reader), WITHIN_S, "one copy each, in step")
        assert {server.state for server in view.servers} == {"serving"}
        assert sum(shard.num_elements for shard in view.shards) == size
        assert {(shard.created, shard.pushes.applied) for shard in view.shards} == {(True, 1)}
        assert {server.num_copies for server in view.servers} == {len(view.shards) // 2}
        assert 1.0 <= view.skew < 1.1
        assert servers.run(reader.read("another")) is None

        servers.stop("ps-1")
        fresh = ShardReader(servers.store)
        view = servers.run(fresh.read("job"))
        assert view is not None
        states = {server.server_id: server.state for server in view.servers}
        assert states["ps-0"] == "serving"
        assert states.get("ps-1") in ("gone", "unreachable", None)
        assert all(shard.created == (shard.server_id == "ps-0") for shard in view.shards)
        servers.run(fresh.close())
        servers.run(reader.close())
        client.close()


def test_the_view_of_samples_has_the_numbers_of_the_ledger() -> None:
    """The view also has the numbers of each epoch."""
    counts = LedgerCounts(
        dataset_size=10,
        num_epochs=2,
        completed=11,
        in_flight=3,
        returned=4,
        ignored=5,
        exhausted=False,
        epochs=(EpochCounts(epoch=1, completed=1, in_flight=3, returned=0),),
    )
    view = samples_view(counts)
    assert (view.completed, view.in_flight, view.repeated_max) == (11, 3, 9)
    assert view.epochs[0].in_flight == 3
