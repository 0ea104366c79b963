"""A member's calls on the channel to the leader."""

from collections.abc import Callable, Mapping

import grpc

from shoal_client.connection.coordinators import Coordinators, Method, chance
from shoal_client.connection.held_stream import Stream
from shoal_client.membership import member_events as ev
from shoal_proto.errors import ShoalError
from shoal_proto.status import from_detail
from shoal_proto.traces import tracing
from shoal_proto.traces.tracing import OngoingSpan
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

Notices = Stream[pb.Notice]

METHODS: Mapping[type, Callable[[grpc.Channel], Method[pb.Ack]]] = {
    pb.ProposeRequest: lambda channel: MembershipStub(channel).Propose,
    pb.AnswerRequest: lambda channel: MembershipStub(channel).Answer,
    pb.SettleRequest: lambda channel: MembershipStub(channel).Settle,
    pb.OfferRequest: lambda channel: MembershipStub(channel).Offer,
    pb.ReadyRequest: lambda channel: MembershipStub(channel).Ready,
    pb.ReportBrokenRequest: lambda channel: MembershipStub(channel).ReportBroken,
    pb.PauseRequest: lambda channel: MembershipStub(channel).Pause,
    pb.LeaveRequest: lambda channel: MembershipStub(channel).Leave,
    pb.DrainRequest: lambda channel: MembershipStub(channel).Drain,
}


def attend(request: pb.AttendRequest, joining: OngoingSpan) -> Callable[[grpc.Channel], Notices]:
    """Function that opens a stream of notices. `joining`: parent of the call's span, until
    `joining` ends."""

    def open_stream(channel: grpc.Channel) -> Notices:
        with joining.within(), tracing.span("Attend"):
            tracing.set_traceparent(request.token)
            return MembershipStub(channel).Attend(request)

    return open_stream


def get_roster(channel: grpc.Channel) -> Method[pb.PackedRoster]:
    """Method that returns one of a job's newest rosters, by its digest."""
    return MembershipStub(channel).GetRoster


def get_job(channel: grpc.Channel) -> Method[pb.JobStanding]:
    """Method that returns a job's phase and members."""
    return MembershipStub(channel).GetJob


def heartbeat(channel: grpc.Channel) -> Method[pb.HeartbeatReply]:
    """Method that sends heartbeats; its reply contains an answer to each."""
    return MembershipStub(channel).Heartbeat


def make_call(
    coordinators: Coordinators, call: ev.CallLeader, gives_up: Callable[[], bool] = lambda: False
) -> ev.CallEnded | ev.HeartbeatRefused:
    """Make the call; return the event that ends it. `gives_up`: see `Coordinators.call`."""
    request, within_s = call.request, call.timeout_s
    try:
        if isinstance(request, pb.HeartbeatRequest):
            reply = coordinators.call(heartbeat, request, timeout_s=within_s, gives_up=gives_up)
            if reply.replies and reply.replies[0].HasField("error"):
                return ev.HeartbeatRefused(error=from_detail(reply.replies[0].error))
        else:
            method = METHODS[type(request)]
            coordinators.call(method, request, timeout_s=within_s, gives_up=gives_up)
    except ShoalError as error:
        return ev.CallEnded(call=call, error=error, chance=chance())
    return ev.CallEnded(call=call)
