"""Incarnations of members are secrets: a process that knows one can make calls as that member.

A stranger reads pages of the HTTP API, answers to calls that need no token, the notices of a
membership of its own, the refusals of forged calls, and the log.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import structlog
from support.clusters.coordinator_world import Served, served
from support.clusters.memory_store import MemoryStore

from shoal_client.membership import member_events as ev
from shoal_client.membership.member_core import MemberCore
from shoal_proto.incarnation import new_incarnation, public_id
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import clocks_pb2, membership_pb2, rendezvous_pb2, samples_pb2, shards_pb2
from shoal_proto.v1.clocks_pb2_grpc import ClocksStub
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub
from shoal_proto.v1.samples_pb2_grpc import SamplesStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.etcd import keys
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

PAGES = (
    "/",
    "/metrics",
    "/healthz",
    "/readyz",
    "/openapi.json",
    "/api/v1/jobs",
    "/api/v1/jobs/j",
    "/api/v1/jobs/j/members",
    "/api/v1/jobs/j/members/a",
    "/api/v1/jobs/j/members/a/why",
    "/api/v1/jobs/j/generations",
    "/api/v1/jobs/j/generations/1",
    "/api/v1/jobs/j/events",
    "/api/v1/jobs/j/shards",
    "/api/v1/servers",
    "/api/v1/jobs/j/members/a/readyz",
)


async def pages(world: Served) -> list[str]:
    app = build_app(world.coordinator.view, world.coordinator.board)
    async with (
        StatusServer(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        answers = [await http.get(page) for page in PAGES]
        forged = {"incarnation": "a guess", "step": 1}
        answers.append(await http.post("/api/v1/jobs/j/members/a/health", json=forged))
        assert answers[-1].status_code == 409
        assert answers[8].status_code == 200 and answers[11].status_code == 200
        return [answer.text for answer in answers]


async def refusal(call: Awaitable[Any]) -> str:
    try:
        return str(await call)
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error, "coordinator")
        return f"{error.details()} {found} {found.details} {error.trailing_metadata()}"


async def calls(address: str) -> list[str]:
    """Return answers to calls without a token, and to calls with a forged token of a member."""
    texts = []
    async with grpc.aio.insecure_channel(address) as channel:
        membership = MembershipStub(channel)
        texts.append(await refusal(membership.GetJob(membership_pb2.GetJobRequest(job="j"))))
        # The first is older than the member's own, as that of a replaced process.
        for incarnation in (new_incarnation(1), "a guess", ""):
            token = Token(job="j", generation=1, member_id="a", incarnation=incarnation)
            beat = membership_pb2.Beat(token=token)
            drain = membership_pb2.DrainRequest(job="j", member_id="a", incarnation=incarnation)
            asked: list[Awaitable[Any]] = [
                membership.Heartbeat(membership_pb2.HeartbeatRequest(beats=[beat])),
                membership.Leave(membership_pb2.LeaveRequest(token=token)),
                membership.Ready(membership_pb2.ReadyRequest(token=token)),
                membership.ReportBroken(membership_pb2.ReportBrokenRequest(token=token)),
                ClocksStub(channel).Rest(clocks_pb2.RestRequest(token=token)),
                RendezvousStub(channel).Get(rendezvous_pb2.StoreGetRequest(token=token)),
                ShardsStub(channel).GetMap(shards_pb2.GetMapRequest(token=token)),
                SamplesStub(channel).Lease(
                    samples_pb2.LeaseRequest(
                        token=token, sequence=1, dataset_size=10, num_epochs=1, num_samples=1
                    )
                ),
            ]
            if incarnation:
                asked.append(membership.Drain(drain))
            texts += [await refusal(call) for call in asked]
            spec = membership_pb2.JobSpec(job="j", min_members=1, max_members=8, desired_members=2)
            attend = membership_pb2.AttendRequest(token=token, spec=spec, protocol=0)
            stream = membership.Attend(attend)
            texts.append(await refusal(stream.read()))
            stream.cancel()
    return texts


async def test_a_stranger_sees_no_incarnation_of_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[str] = []
    step = MemberCore.step

    def overhear(self: MemberCore, event: ev.Event, now_s: float) -> list[ev.Effect]:
        if isinstance(event, ev.NoticeReceived):
            received.append(f"{self.identity.member_id} {event.notice}")
        return step(self, event, now_s)

    monkeypatch.setattr(MemberCore, "step", overhear)
    store = MemoryStore()
    with structlog.testing.capture_logs() as logs:
        async with served(store) as world:
            members = await world.training("a", "b")
            secrets = {each.token.member_id: each.token.incarnation for each in members}
            stranger = await world.joined("stranger", desired=2)
            await asyncio.to_thread(stranger.await_generation, 1, 10.0)
            texts = [*await pages(world), *await calls(world.address)]
            stored = await store.get(keys.generation("j", 1))
    texts += [text for text in received if text.startswith("stranger ")]
    assert any("prepare" in text for text in texts) and any("outcome" in text for text in texts)
    texts += [str(line) for line in logs if line["log_level"] != "debug"]
    leaks = {name: [t for t in texts if secret in t] for name, secret in secrets.items()}
    assert leaks == {"a": [], "b": []}
    # Public ids still identify members, and a successor finds their incarnations in etcd.
    assert sum(public_id(secrets["a"]) in text for text in texts) > 3
    assert stored is not None
    entries = stored_record("j", 1, stored.value).roster.entries
    assert {entry.member_id: entry.incarnation for entry in entries} == secrets
