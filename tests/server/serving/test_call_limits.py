"""Limits of a gRPC port: silent connections are closed, calls are bounded, and faults are
counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from fuzzing.calls import all_calls
from google.protobuf.empty_pb2 import Empty
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto import descriptor_limit
from shoal_proto.errors import InternalError, InvalidSpec, Overloaded
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.weights_pb2 import RollbackRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub
from shoal_server.serving.access.roles import MAY_CALL, OPERATOR
from shoal_server.serving.admission import audit, descriptors
from shoal_server.serving.admission.audit import AUDITED
from shoal_server.serving.admission.calls import CallCounts
from shoal_server.serving.admission.config import CallLimits, HttpLimits
from shoal_server.serving.durations import Durations
from shoal_server.serving.rpc import Context, bind, call_durations, new_server

SOON_S = 30.0


class Echo:
    """Service with two calls that wait for `may_answer`, one with a fault, and one that refuses."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_waiting = 0

    async def wait(self, request: Empty, context: Context) -> Empty:
        self.num_waiting += 1
        await self.may_answer.wait()
        return Empty()

    async def stream(self, request: Empty, context: Context) -> AsyncIterator[Empty]:
        self.num_waiting += 1
        await self.may_answer.wait()
        yield Empty()

    async def fail(self, request: Empty, context: Context) -> Empty:
        raise KeyError("a fault of the server's")

    async def refuse(self, request: Empty, context: Context) -> Empty:
        raise InvalidSpec("no")


def handlers(echo: Echo) -> dict[str, Any]:
    codec = {"request_deserializer": Empty.FromString, "response_serializer": _bytes}
    return {
        "Wait": grpc.unary_unary_rpc_method_handler(echo.wait, **codec),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream, **codec),
        "Fail": grpc.unary_unary_rpc_method_handler(echo.fail, **codec),
        "Refuse": grpc.unary_unary_rpc_method_handler(echo.refuse, **codec),
    }


def _bytes(message: Empty) -> bytes:
    return message.SerializeToString()


@asynccontextmanager
async def serving(
    limits: CallLimits, durations: Durations | None = None
) -> AsyncIterator[tuple[Echo, CallCounts, int]]:
    counts, echo = CallCounts(limits), Echo()
    server = new_server(durations, counts, limits)
    of_echo = grpc.method_handlers_generic_handler("t.Echo", handlers(echo))
    server.add_generic_rpc_handlers((of_echo,))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(SOON_S):
            yield echo, counts, port
    finally:
        echo.may_answer.set()
        await server.stop(None)


def call(channel: grpc.aio.Channel, name: str) -> Any:
    make = channel.unary_stream if name == "Stream" else channel.unary_unary
    codec = {"request_serializer": _bytes, "response_deserializer": Empty.FromString}
    return make(f"/t.Echo/{name}", **codec)(Empty())


async def test_a_silent_connection_is_closed() -> None:
    """A connection is closed if it sends nothing, or does not speak HTTP/2."""
    async with serving(CallLimits(handshake_s=0.2)) as (_, _, port):
        for sent in (b"", b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            # The server's own settings come first, then the end.
            try:
                await reader.read()
            except ConnectionResetError:
                continue
            finally:
                writer.close()


async def test_the_number_of_connections_is_bounded() -> None:
    """Existing connections continue; once some are closed, another one is accepted."""
    async with serving(CallLimits(max_connections=4, handshake_s=20.0)) as (echo, _, port):
        echo.may_answer.set()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as first:
            await call(first, "Wait")
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b"", "closed at once"
            writer.close()
            await call(first, "Wait")
            for _, silent in held:
                silent.close()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as second:
                await call(second, "Wait")


@pytest.mark.parametrize("limits", [CallLimits(max_calls=3), CallLimits(max_calls_per_peer=3)])
async def test_a_call_beyond_the_limit_is_refused_as_overloaded(limits: CallLimits) -> None:
    """Streams and waiting calls count alike; once one ends, another is accepted."""
    async with serving(limits) as (echo, counts, port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            waiting = [call(channel, "Wait"), call(channel, "Wait"), call(channel, "Stream")]
            reading = asyncio.ensure_future(waiting[2].read())
            while echo.num_waiting < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.RpcError) as raised:
                await call(channel, "Wait")
            refusal = from_rpc_error(raised.value, "server")
            assert isinstance(refusal, Overloaded)
            assert "at most 3" in str(refusal)
            assert (counts.num_open, dict(counts.refused)) == (3, {"Overloaded": 1})
            waiting[0].cancel()
            while counts.num_open == 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            echo.may_answer.set()
            await call(channel, "Wait")
            await asyncio.gather(waiting[1], reading)
        while counts.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_fault_is_an_internal_error_and_counted() -> None:
    """Faults are counted apart from refusals, so that an alarm can use them."""
    async with (
        serving(CallLimits()) as (_, counts, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        with pytest.raises(grpc.RpcError) as raised:
            await call(channel, "Fail")
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert isinstance(from_rpc_error(raised.value, "server"), InternalError)
        with pytest.raises(grpc.RpcError):
            await call(channel, "Refuse")
    assert dict(counts.failed) == {"/t.Echo/Fail": 1}
    assert dict(counts.refused) == {"InvalidSpec": 1}


async def test_a_cancelled_call_is_not_counted_as_successful(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled call may have taken effect, and is in the audit log as well."""
    monkeypatch.setattr(audit, "AUDITED", {"/t.Echo/Wait"})
    durations = call_durations()
    with structlog.testing.capture_logs() as logs:
        await _cancel_a_call(durations)
    assert [labels for labels, _, _ in durations.series()] == [("Echo/Wait", "cancelled")]
    assert [line["outcome"] for line in logs if line["event"] == "operator_call"] == ["cancelled"]


async def _cancel_a_call(durations: Durations) -> None:
    async with (
        serving(CallLimits(), durations) as (echo, counts, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        waiting = call(channel, "Wait")
        while not echo.num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        while counts.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [CallLimits, HttpLimits])
def test_limits_of_zero_are_refused(kind: type[CallLimits | HttpLimits]) -> None:
    """The error names the option."""
    for name in vars(kind()):
        with pytest.raises(InvalidSpec, match=f"--{name.replace('_', '-')}"):
            kind(**{name: 0})


def test_connections_leave_descriptors_for_the_process_itself() -> None:
    """gRPC and HTTP together have at most the descriptors that are not reserved, for any
    setting."""
    limit = descriptor_limit.limit()
    options = dict(CallLimits(max_connections=2**30).channel_options)
    of_grpc = options["grpc.max_allowed_incoming_connections"]
    of_http = HttpLimits(http_connections=2**30).most_connections
    assert of_grpc + of_http <= limit - descriptors.RESERVED
    assert not descriptors.is_reserved(3)
    assert descriptors.is_reserved(limit - 1)


async def test_calls_of_operators_are_logged() -> None:
    """Refused calls are logged as well; calls that only read are not."""
    async with served(MemoryStore()) as world:
        await world.training("a")
        with structlog.testing.capture_logs() as logs:
            async with grpc.aio.insecure_channel(world.address) as channel:
                stub = MembershipStub(channel)
                await stub.GetJob(pb.GetJobRequest(job="j"))
                await stub.StopJob(pb.StopJobRequest(job="j", reason="late"))
                with pytest.raises(grpc.RpcError):
                    await stub.Drain(pb.DrainRequest(job="nope", member_id="a"))
                with pytest.raises(grpc.RpcError):
                    await WeightSeriesStub(channel).Rollback(RollbackRequest(series="j/w", to=1))
    calls = [line for line in logs if line["event"] == "operator_call"]
    logged = [(line["call"], line["job"] or line["series"], line["outcome"]) for line in calls]
    assert logged == [
        ("/shoal.v1.Membership/StopJob", "j", "OK"),
        ("/shoal.v1.Membership/Drain", "nope", "UnknownJob"),
        ("/shoal.v1.WeightSeries/Rollback", "j/w", "UnknownSeries"),
    ]
    assert all("127.0.0.1" in line["peer"] for line in calls)


def test_every_audited_call_exists() -> None:
    assert {call.path for call in all_calls()} >= AUDITED


def test_every_call_that_only_operators_may_make_is_audited() -> None:
    assert {call for call, roles in MAY_CALL.items() if roles <= {OPERATOR}} <= AUDITED
