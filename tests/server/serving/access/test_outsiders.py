"""Callers that may not make a call are refused, and change nothing.

Each call of each service is made over gRPC: without a certificate, with one of another authority,
with an expired one, in each role that may not make it, and by a worker of another job. The requests
have the token of a training member: only the certificate is wrong.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc.experimental.session_cache import ssl_session_cache_lru
from grpc_health.v1 import health_pb2
from support.clusters.tls_world import PAST, TlsWorld, credentials
from support.members.scripted_member import HOST, ScriptedMember

from shoal_client.commands.status import StatusClient
from shoal_client.connection import tls_refusals
from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.tls_refusals import why_refused
from shoal_proto.errors import AccessDenied, CertificateRefused, Fenced, UnknownMember
from shoal_proto.etcd import etcd_pb2
from shoal_proto.etcd.etcd_pb2_grpc import KVStub
from shoal_proto.incarnation import new_incarnation
from shoal_proto.status import from_rpc_error
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.names import COORDINATOR_NAME, SERVER_NAME, Caller, CertificateRole
from shoal_proto.v1 import (
    clocks_pb2,
    membership_pb2,
    outputs_pb2,
    parameters_pb2,
    rendezvous_pb2,
    repair_pb2,
    replication_pb2,
    samples_pb2,
    shards_pb2,
    snapshots_pb2,
    tables_pb2,
    weights_pb2,
)
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.serving.access.checks import check_request
from shoal_server.serving.access.roles import MAY_CALL, READS_OUTPUT

ROOT = Path(__file__).parents[4]
MODULES = (
    *(clocks_pb2, membership_pb2, parameters_pb2, rendezvous_pb2, repair_pb2, replication_pb2),
    *(outputs_pb2, samples_pb2, shards_pb2, snapshots_pb2, tables_pb2, weights_pb2, health_pb2),
)
METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
ON_A_SERVER = ("Parameters/", "Replication/", "ShardSnapshots/", "WeightStore/")
OF_NO_JOB = (
    "/shoal.v1.Membership/GetCluster",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
)
NOT_SERVED = ("/grpc.health.v1.Health/List",)
REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
WITHIN_S = 5.0


def is_on_a_server(method: str) -> bool:
    return any(name in method for name in ON_A_SERVER)


def filled(kind: Descriptor, token: Token, depth: int = 3) -> Message:
    """Return a request with the member's token, and for its job."""
    message: Any = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if field.message_type is None:
            if field.name in ("job", "member_id", "incarnation"):
                setattr(message, field.name, getattr(token, field.name))
            elif field.name == "series":
                message.series = f"{token.job}/policy"
        elif field.message_type.full_name == "shoal.v1.Token":
            getattr(message, field.name).CopyFrom(token)
        elif field.name in ("spec", "header", "publisher"):
            getattr(message, field.name).CopyFrom(filled(field.message_type, token, depth - 1))
        elif field.name == "beats":
            getattr(message, field.name).append(filled(field.message_type, token, depth - 1))
    return message  # type: ignore[no-any-return]


class RawCaller:
    """Caller with a channel to the coordinator and one to the parameter server."""

    def __init__(
        self,
        world: TlsWorld,
        using: grpc.ChannelCredentials | None,
        further: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._channels = {}
        for name, address in (
            (COORDINATOR_NAME, world.cluster.coordinator),
            (SERVER_NAME, world.cluster.parameter_servers[0]),
        ):
            options = (("grpc.ssl_target_name_override", name), *further)
            self._channels[name] = (
                grpc.insecure_channel(address)
                if using is None
                else grpc.secure_channel(address, using, options)
            )

    def call(self, method: str, token: Token, within_s: float = WITHIN_S) -> grpc.RpcError | None:
        """Return the error that ended the call; None for an answer."""
        found = METHODS[method]
        channel = self._channels[SERVER_NAME if is_on_a_server(method) else COORDINATOR_NAME]
        kind = "stream" if found.client_streaming else "unary"
        kind += "_stream" if found.server_streaming else "_unary"
        request = filled(found.input_type, token)
        make: Any = getattr(channel, kind)(method, request_serializer=_serialized)
        try:
            answer = make(iter([request]) if found.client_streaming else request, timeout=within_s)
            if found.server_streaming:
                with closing(_Stream(answer)):
                    next(answer, None)
        except grpc.RpcError as error:
            return error
        return None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


class _Stream:
    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def state(world: TlsWorld) -> dict[bytes, bytes]:
    """Return all keys in etcd without those of jobs and series of other tests."""
    with grpc.insecure_channel(world.cluster.etcd) as channel:
        found = KVStub(channel).Range(etcd_pb2.RangeRequest(key=b"\0", range_end=b"\0"))
        return {item.key: item.value for item in found.kvs if b"/by-" not in item.key}


def standing(world: TlsWorld) -> str:
    """Return the coordinator's answer about job j."""
    with identity.using(world.files(CertificateRole.OPERATOR)):
        coordinators = Coordinators([world.cluster.coordinator])
        try:
            request = membership_pb2.GetJobRequest(job="j")
            return str(
                coordinators.call(lambda c: MembershipStub(c).GetJob, request, timeout_s=WITHIN_S)
            )
        finally:
            coordinators.close()


def test_the_table_of_roles_has_every_call() -> None:
    assert set(MAY_CALL) == set(METHODS) - set(NOT_SERVED)


def as_markdown() -> str:
    """The table of roles as docs/security.md has it."""
    roles = tuple(CertificateRole)
    lines = [
        "| call | " + " | ".join(role.value for role in roles) + " |",
        "|---|" + "---|" * len(roles),
    ]
    for method, allowed in MAY_CALL.items():
        marks = ("yes" if role in allowed else "" for role in roles)
        name = method.removeprefix("/").removeprefix("shoal.v1.").replace("/", ".")
        lines.append(f"| `{name}` | " + " | ".join(marks) + " |")
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def test_the_documented_table_of_roles_is_that_of_the_code() -> None:
    """docs/security.md shows the table as `as_markdown` writes it."""
    assert as_markdown() in (ROOT / "docs" / "security.md").read_text()


@pytest.mark.long
def test_each_call_is_refused_to_each_role_without_permission(
    world: TlsWorld, member: ScriptedMember
) -> None:
    before, token, standing_before = state(world), member.token(), standing(world)
    answered = []
    for role in CertificateRole:
        with closing(RawCaller(world, credentials(world.files(role)))) as caller:
            for method, roles in MAY_CALL.items():
                if role in roles:
                    continue
                error = caller.call(method, token)
                if error is None or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                    answered.append((role, method, error))
                    continue
                named = from_rpc_error(error, "it")
                assert isinstance(named, AccessDenied) and role.value in named.seen
    assert answered == []
    assert state(world) == before and standing(world) == standing_before and member.failure is None


@pytest.mark.long
def test_each_call_is_refused_to_a_worker_of_another_job(
    world: TlsWorld, member: ScriptedMember
) -> None:
    before, token, standing_before = state(world), member.token(), standing(world)
    other = Caller(CertificateRole.WORKER, "worker-of-another", "other")
    answered = []
    with closing(RawCaller(world, credentials(world.issued(other)))) as caller:
        for method, roles in MAY_CALL.items():
            if CertificateRole.WORKER not in roles or method in OF_NO_JOB:
                continue
            error = caller.call(method, token)
            if error is None or error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                answered.append((method, error))
                continue
            assert "another job" in from_rpc_error(error, "it").what
    assert answered == []
    assert state(world) == before and standing(world) == standing_before and member.failure is None


def test_a_worker_of_one_job_is_refused_what_is_about_all_jobs() -> None:
    """An empty job means all jobs in requests that list. An absent token names no job."""
    worker = Caller(CertificateRole.WORKER, "w", "a")
    listing = (weights_pb2.ListSeriesRequest, parameters_pb2.DescribeRequest)
    for request in listing:
        with pytest.raises(AccessDenied, match="for one job") as raised:
            check_request(worker, request())
        assert raised.value.expected == "job a"
        check_request(worker, request(job="a"))
        check_request(Caller(CertificateRole.WORKER, "w"), request())
    check_request(worker, parameters_pb2.PushRequest())


def test_a_reader_may_only_read_its_series(world: TlsWorld, member: ScriptedMember) -> None:
    """Calls of a reader are refused for another series. Over a bulk connection, where requests are
    checked on their own, a reader may only fetch segments."""
    before, reader = state(world), Caller(CertificateRole.READER, "engine", series="j/policy")
    other = Token(job="other")
    with closing(RawCaller(world, credentials(world.issued(reader)))) as caller:
        assert caller.call("/shoal.v1.WeightSeries/Watch", member.token()) is None
        for method, roles in MAY_CALL.items():
            if CertificateRole.READER in roles and "WeightS" in method:
                error = caller.call(method, other)
                assert error is not None and error.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "another series" in from_rpc_error(error, "it").what, method
    put = weights_pb2.PutSegmentRequest(series="j/policy")
    with pytest.raises(AccessDenied, match="reads published weights, and nothing else"):
        check_request(reader, put)
    with pytest.raises(AccessDenied, match="reads published weights, and nothing else"):
        check_request(reader, parameters_pb2.PullRequest())
    check_request(reader, weights_pb2.FetchSegmentRequest(series="j/policy"))
    assert state(world) == before and member.failure is None


def test_a_worker_cannot_drain_another_member(world: TlsWorld, member: ScriptedMember) -> None:
    """The request of the worker lacks the other member's incarnation."""
    standing_before = standing(world)
    with closing(RawCaller(world, credentials(world.files(CertificateRole.WORKER)))) as caller:
        token = member.token()
        token.incarnation = ""
        error = caller.call("/shoal.v1.Membership/Drain", token)
    assert error is not None and error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert standing(world) == standing_before and member.failure is None


def test_only_a_member_can_drop_the_shards_of_its_job(
    world: TlsWorld, member: ScriptedMember
) -> None:
    """A worker's certificate is not enough: the call needs the incarnation of a member."""
    with closing(RawCaller(world, credentials(world.files(CertificateRole.WORKER)))) as caller:
        assert caller.call("/shoal.v1.Parameters/Drop", member.token()) is None
        stranger = member.token()
        stranger.incarnation = new_incarnation()
        error = caller.call("/shoal.v1.Parameters/Drop", stranger)
    assert error is not None and isinstance(from_rpc_error(error, "it"), Fenced)


def test_a_report_on_a_member_needs_its_launchers_secret_or_an_operator(
    world: TlsWorld, member: ScriptedMember
) -> None:
    """The member has no launcher's secret: every report of a worker is refused."""
    standing_before, script = standing(world), member.script
    report = membership_pb2.ReportExitRequest(
        job="j", member_id="a", pid=script.pid, host=HOST, exit_code=-9, launch_secret="guess"
    )
    with identity.using(world.files(CertificateRole.WORKER)):
        coordinators = Coordinators([world.cluster.coordinator])
        with (
            closing(coordinators),
            pytest.raises(AccessDenied, match="a report on a is not accepted"),
        ):
            coordinators.call(lambda c: MembershipStub(c).ReportExit, report, timeout_s=WITHIN_S)
    assert standing(world) == standing_before and member.failure is None


def test_a_reader_cannot_read_the_status_of_jobs(world: TlsWorld, member: ScriptedMember) -> None:
    for role, is_accepted in ((CertificateRole.VIEWER, True), (CertificateRole.READER, False)):
        # The member must not connect with this identity: see below.
        with identity.using(world.files(role)):
            client = StatusClient(world.cluster.http_url)
        with client, nullcontext() if is_accepted else pytest.raises(AccessDenied):
            assert client.jobs()
    assert member.failure is None


@pytest.mark.sampled()
@pytest.mark.parametrize("role", list(CertificateRole))
def test_only_operators_and_viewers_can_read_output(
    world: TlsWorld, member: ScriptedMember, role: CertificateRole
) -> None:
    """The certificate used over HTTP decides. The member has no launcher, so that those who may
    read get UnknownMember."""
    refusal = UnknownMember if role in READS_OUTPUT else AccessDenied
    # The identity is that of the process: the member must not connect with this one.
    with identity.using(world.files(role)):
        client = StatusClient(world.cluster.http_url)
    with client, pytest.raises(refusal):
        client.output("j", "a")
    assert {
        CertificateRole.OPERATOR,
        CertificateRole.VIEWER,
    } == READS_OUTPUT and member.failure is None


@pytest.mark.parametrize("who", ["no TLS", "no certificate", "another authority", "expired"])
def test_no_call_passes_without_a_valid_certificate(
    world: TlsWorld, member: ScriptedMember, who: str
) -> None:
    before, token, standing_before = state(world), member.token(), standing(world)
    using = {
        "no TLS": lambda: None,
        "no certificate": lambda: grpc.ssl_channel_credentials(
            (world.certificates / "ca.crt").read_bytes()
        ),
        "another authority": lambda: credentials(world.strange_files(CertificateRole.OPERATOR)),
        "expired": lambda: credentials(expired(world)),
    }[who]()
    answered = []
    with closing(RawCaller(world, using)) as caller:
        for method in MAY_CALL:
            error = caller.call(method, token)
            if error is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                answered.append((method, error))
    assert answered == []
    assert state(world) == before and standing(world) == standing_before and member.failure is None


def test_a_session_ticket_is_no_certificate(world: TlsWorld, member: ScriptedMember) -> None:
    """gRPC issues tickets, and does not check the certificate again when a session is resumed."""
    before, token, standing_before = state(world), member.token(), standing(world)
    # With a cache, gRPC's client resumes the session of an earlier connection to that name.
    cache = (("grpc.ssl_session_cache", ssl_session_cache_lru(16)),)
    using = credentials(world.files(CertificateRole.OPERATOR))
    asked = ("/shoal.v1.Membership/GetCluster", "/shoal.v1.Parameters/Describe")
    with closing(RawCaller(world, using, cache)) as caller:
        first = [caller.call(method, token) for method in asked]
    assert [error for error in first if error and error.code() in REFUSED] == []
    taken = []
    with closing(RawCaller(world, using, cache)) as caller:
        for method in MAY_CALL:
            error = caller.call(method, token)
            if error is None or not isinstance(from_rpc_error(error, method), CertificateRefused):
                taken.append((method, error))
    assert taken == []
    assert state(world) == before and standing(world) == standing_before and member.failure is None


def expired(world: TlsWorld) -> TlsFiles:
    return world.issued(Caller(CertificateRole.OPERATOR, "of-yesterday"), PAST)


@pytest.mark.parametrize("name", [COORDINATOR_NAME, SERVER_NAME])
def test_a_refused_certificate_is_distinguished_from_an_absent_server(
    world: TlsWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails with CertificateRefused, and is not repeated until its timeout."""
    # This process may have called another cluster without TLS at the same address before.
    monkeypatch.setattr(tls_refusals, "answered_plainly", set())
    cluster = world.cluster
    address = cluster.coordinator if name == COORDINATOR_NAME else cluster.parameter_servers[0]
    cases = {
        "alert": [world.strange_files(CertificateRole.OPERATOR), expired(world)],
        "needs TLS": [None],
    }
    for kind, each in ((kind, files) for kind, found in cases.items() for files in found):
        with identity.using(each):
            refused = why_refused(address, name)
            assert refused is not None, each
            expected = "speaks TLS" if kind == "needs TLS" else "no TLS connection"
            assert expected in refused.what
            if name == COORDINATOR_NAME:
                coordinators, began_s = Coordinators([address]), time.monotonic()
                request = membership_pb2.GetJobRequest(job="j")
                with closing(coordinators), pytest.raises(CertificateRefused):
                    coordinators.call(lambda c: MembershipStub(c).GetJob, request, timeout_s=60.0)
                assert time.monotonic() - began_s < 30.0
    with identity.using(world.files(CertificateRole.OPERATOR)):
        assert why_refused(address, name) is None
        assert why_refused("127.0.0.1:1", name) is None


def test_a_certificate_of_another_role_is_not_accepted_as_a_coordinators(world: TlsWorld) -> None:
    """A parameter server cannot pose as a coordinator: its certificate does not have the name that
    callers require."""
    with identity.using(world.files(CertificateRole.WORKER)):
        refused = why_refused(world.cluster.parameter_servers[0], COORDINATOR_NAME)
    assert refused is not None and "does not accept its certificate" in refused.seen


@pytest.mark.parametrize(
    "role", [CertificateRole.OPERATOR, CertificateRole.VIEWER, CertificateRole.WORKER]
)
def test_each_call_passes_for_the_roles_with_permission(
    world: TlsWorld, role: CertificateRole
) -> None:
    """A permitted call may still be refused for another reason: the job does not exist."""
    token = Token(job="nobody-trains-this", member_id="x", incarnation="1")
    with closing(RawCaller(world, credentials(world.files(role)))) as caller:
        for method, roles in MAY_CALL.items():
            if role in roles:
                error = caller.call(method, token, within_s=1.0)
                assert error is None or error.code() not in REFUSED, (method, error)
