"""Bounds on fields of requests: beyond a bound, the refusal names the field."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_proto.errors import InvalidSpec
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.v1 import clocks_pb2, rendezvous_pb2, samples_pb2, shards_pb2
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.clocks_pb2_grpc import ClocksStub
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub
from shoal_proto.v1.samples_pb2_grpc import SamplesStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_server.serving.message_bounds import MessageBounds

LONG = "x" * (2 << 20)
TOKEN = Token(job="j", member_id="a", incarnation="1")


def attend(**info: Any) -> pb.AttendRequest:
    return pb.AttendRequest(
        protocol=OWN_PROTOCOLS.newest,
        token=TOKEN,
        spec=pb.JobSpec(job="j", min_members=1, max_members=2, desired_members=1),
        info=pb.MemberInfo(**info),
    )


def propose(fields: Mapping[str, str]) -> pb.ProposeRequest:
    return pb.ProposeRequest(token=TOKEN, proposal=pb.Proposal(fields=fields))


REFUSED: Mapping[str, tuple[object, str]] = {
    "a host of 2 MB": (attend(host=LONG), "MemberInfo.host"),
    "a device of 2 MB": (attend(device=LONG), "MemberInfo.device"),
    "an address of 2 MB": (attend(address=LONG), "MemberInfo.address"),
    "a member_id": (pb.SettleRequest(token=Token(member_id=LONG)), "Token.member_id"),
    "an incarnation": (pb.SettleRequest(token=Token(incarnation=LONG)), "Token.incarnation"),
    "a last call that never ends": (
        pb.AttendRequest(spec=pb.JobSpec(last_call_s=math.inf)),
        "JobSpec.last_call_s",
    ),
    "many fields": (propose({str(i): "" for i in range(1000)}), "Proposal.fields"),
    "a long value": (propose({"schema": LONG}), "Proposal.fields.value"),
    "a long key": (propose({LONG: ""}), "Proposal.fields.key"),
    "a digest": (pb.AnswerRequest(token=TOKEN, digest=LONG), "AnswerRequest.digest"),
    "a validator's text": (
        pb.AnswerRequest(token=TOKEN, rejections=[pb.Rejection(seen=LONG)]),
        "Rejection.seen",
    ),
    "a peer's error": (
        pb.AnswerRequest(token=TOKEN, unreachable=[pb.Unreachable(error=LONG)]),
        "Unreachable.error",
    ),
    "why it leaves": (pb.LeaveRequest(token=TOKEN, reason=LONG), "LeaveRequest.reason"),
    "why it broke": (pb.ReportBrokenRequest(error=LONG), "ReportBrokenRequest.error"),
    "why it is drained": (pb.DrainRequest(job="j", reason=LONG), "DrainRequest.reason"),
    "a host that exits": (pb.ReportExitRequest(host=LONG), "ReportExitRequest.host"),
    "beats": (pb.HeartbeatRequest(beats=[pb.Beat()] * 20_000), "HeartbeatRequest.beats"),
    "a wait without an end": (
        shards_pb2.GetMapRequest(token=TOKEN, wait_s=math.inf),
        "GetMapRequest.wait_s",
    ),
    "a wait in the past": (
        shards_pb2.GetMapRequest(token=TOKEN, wait_s=-1.0),
        "GetMapRequest.wait_s",
    ),
    "a wait of 1e300 s": (
        shards_pb2.GetMapRequest(token=TOKEN, wait_s=1e300),
        "GetMapRequest.wait_s",
    ),
    "a wait for a key": (
        rendezvous_pb2.StoreGetRequest(token=TOKEN, timeout_s=math.nan),
        "StoreGetRequest.timeout_s",
    ),
    "a key": (rendezvous_pb2.StoreAddRequest(token=TOKEN, key=LONG), "StoreAddRequest.key"),
    "a wait for a clock": (
        clocks_pb2.AdvanceRequest(token=TOKEN, wait_s=math.nan),
        "AdvanceRequest.wait_s",
    ),
    "a wait for a map": (
        shards_pb2.GetMapRequest(token=TOKEN, wait_s=math.nan),
        "GetMapRequest.wait_s",
    ),
    "a parameter's name": (
        shards_pb2.PlaceRequest(token=TOKEN, parameters=[shards_pb2.ParameterSpec(name=LONG)]),
        "ParameterSpec.name",
    ),
    "a port that is too large": (attend(probe_port=70_000), "MemberInfo.probe_port"),
    "a step beyond that of records": (
        pb.SettleRequest(token=TOKEN, step=2**60),
        "SettleRequest.step",
    ),
    "bounds beyond those of records": (
        pb.AttendRequest(spec=pb.JobSpec(max_members=2**32 - 1)),
        "JobSpec.max_members",
    ),
    "a checkpoint": (
        pb.AnswerRequest(token=TOKEN, checkpoint_steps=[1, 2**63]),
        "AnswerRequest.checkpoint_steps",
    ),
    "a lease": (samples_pb2.LeaseRequest(token=Token(job=LONG)), "Token.job"),
}

Method = Callable[[grpc.Channel], Any]
METHODS: Mapping[str, Method] = {
    "AttendRequest": lambda channel: MembershipStub(channel).Attend,
    "ProposeRequest": lambda channel: MembershipStub(channel).Propose,
    "AnswerRequest": lambda channel: MembershipStub(channel).Answer,
    "SettleRequest": lambda channel: MembershipStub(channel).Settle,
    "LeaveRequest": lambda channel: MembershipStub(channel).Leave,
    "ReportBrokenRequest": lambda channel: MembershipStub(channel).ReportBroken,
    "ReportExitRequest": lambda channel: MembershipStub(channel).ReportExit,
    "DrainRequest": lambda channel: MembershipStub(channel).Drain,
    "HeartbeatRequest": lambda channel: MembershipStub(channel).Heartbeat,
    "StoreGetRequest": lambda channel: RendezvousStub(channel).Get,
    "StoreAddRequest": lambda channel: RendezvousStub(channel).Add,
    "AdvanceRequest": lambda channel: ClocksStub(channel).Advance,
    "GetMapRequest": lambda channel: ShardsStub(channel).GetMap,
    "PlaceRequest": lambda channel: ShardsStub(channel).Place,
    "LeaseRequest": lambda channel: SamplesStub(channel).Lease,
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_names_the_field_that_is_out_of_bounds(case: str) -> None:
    request, field = REFUSED[case]
    with pytest.raises(InvalidSpec) as raised:
        MessageBounds().check(request)
    assert raised.value.details == {"field": field}
    assert raised.value.seen
    assert len(str(raised.value)) < 400, "the refusal is short"


def test_requests_of_members_are_accepted() -> None:
    info = dict.fromkeys(("host", "address"), "h" * 255)
    MessageBounds().check(attend(**info))
    MessageBounds().check(propose({"schema": "s" * 4096, "optimizer": ""}))
    MessageBounds().check(shards_pb2.GetMapRequest(token=TOKEN, wait_s=3600.0))
    year_ns = 365 * 24 * 3600 * 10**9
    MessageBounds().check(samples_pb2.LeaseRequest(token=TOKEN, sequence=year_ns))
    MessageBounds().check(
        rendezvous_pb2.StoreSetRequest(pairs=[{"key": "k", "value": b"x" * (1 << 24)}])
    )


async def test_every_service_refuses_requests_out_of_bounds() -> None:
    """The usual client makes the calls, and the coordinator continues with its job."""
    async with served(MemoryStore()) as world:
        await world.training("a", "b")

        def refusals() -> dict[str, str]:
            coordinators = Coordinators([world.address])
            found = {}
            for case, (request, _) in REFUSED.items():
                method = METHODS[type(request).__name__]
                with pytest.raises(InvalidSpec) as raised:
                    coordinators.call(lambda c, m=method: _once(m(c)), request, timeout_s=5.0)
                found[case] = raised.value.details["field"]
            coordinators.close()
            return found

        assert await asyncio.to_thread(refusals) == {c: field for c, (_, field) in REFUSED.items()}
        assert not world.coordinator.term.deposed.is_set()
        job = world.coordinator.registry.find("j").job
        assert (job.phase.value, job.last_generation, len(job.members)) == ("running", 1, 2)


def _once(method: Any) -> Any:
    """Wrap a method so that a stream returns its first answer, as a unary method does."""

    def call(request: Any, timeout: float | None = None) -> Any:
        answer = method(request, timeout=timeout)
        return next(answer) if hasattr(answer, "__next__") else answer

    return call
