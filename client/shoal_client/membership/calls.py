"""Which method of the membership stub a call goes to, on whatever channel leads at the time."""

from collections.abc import Callable, Mapping

import grpc

from shoal_client.connection.coordinators import Method
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub


def propose(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Propose


def answer(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Answer


def settle(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Settle


def offer(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Offer


def ready(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Ready


def report_broken(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).ReportBroken


def pause(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Pause


def leave(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Leave


def drain(channel: grpc.Channel) -> Method[pb.Ack]:
    return MembershipStub(channel).Drain


def heartbeat(channel: grpc.Channel) -> Method[pb.HeartbeatReply]:
    return MembershipStub(channel).Heartbeat


METHODS: Mapping[type, Callable[[grpc.Channel], Method[pb.Ack]]] = {
    pb.ProposeRequest: propose,
    pb.AnswerRequest: answer,
    pb.SettleRequest: settle,
    pb.OfferRequest: offer,
    pb.ReadyRequest: ready,
    pb.ReportBrokenRequest: report_broken,
    pb.PauseRequest: pause,
    pb.LeaveRequest: leave,
    pb.DrainRequest: drain,
}
"""By the type of the request."""
