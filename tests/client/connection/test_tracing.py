"""Traces from a worker's calls through the servers to etcd, with OpenTelemetry's SDK."""

import asyncio
import gzip
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.clusters.coordinator_world import Served, entered, propose, served
from support.clusters.etcd_fixture import running_etcd
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import InvalidSpec
from shoal_proto.traces import tracing
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

SCHEMA = [ParameterSpec(name="w", shape=[100], dtype="float32")]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


class Spans(InMemorySpanExporter):
    """Spans of this process, in which the servers run as well."""

    def paths(self) -> list[list[str]]:
        """Return, for each span, the names from its trace's root to it."""
        by_id = {span.context.span_id: span for span in self.finished}
        return [_path_to(span, by_id) for span in self.finished]

    @property
    def finished(self) -> list[ReadableSpan]:
        return list(self.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished if span.name == name]


def _path_to(span: ReadableSpan, by_id: dict[int, ReadableSpan]) -> list[str]:
    names = [span.name]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return names[::-1]


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter, provider = Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def filled(value: float) -> memoryview:
    return memoryview(array("f", [value]) * 100).cast("B")


def test_placements_and_pushes_are_traces(spans: Spans, tmp_path: Path) -> None:
    """A trace has the caller's span, within it the server's, and for a placement etcd's within
    that."""
    with running_etcd(tmp_path) as etcd, ParameterServers(2, etcd=etcd) as servers:
        token = servers.admit("w0")
        client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
        client.place(SCHEMA)
        client.create(SGD, {"w": filled(0.0)})
        # The server looks up this new process of the member in etcd.
        token = servers.admit("w0", incarnation="two")
        values = filled(9.0)
        client.push({"w": filled(-1.0)}, into={"w": values})
        assert set(values.cast("f")) == {1.0}
        client.close()
    paths = spans.paths()
    assert ["Push", "Parameters/Push"] in paths
    placing = [path for path in paths if path[:2] == ["Place", "Shards/Place"]]
    assert any(path[-1].startswith("etcd") for path in placing), paths
    [push] = spans.named("Push")
    [served_push] = spans.named("Parameters/Push")
    # The last part of the answer is sent before the server's span ends.
    assert push.start_time <= served_push.start_time <= push.end_time


async def test_a_join_is_one_trace(spans: Spans, tmp_path: Path) -> None:
    """The trace of a join has all calls of a member until it trains, each with the coordinator's
    span and its writes to etcd. A later call has a trace of its own."""
    with running_etcd(tmp_path) as etcd:
        store = EtcdClient(EtcdConfig(endpoints=(etcd,)))
        async with served(store) as world:
            await _joins_and_leaves(world)
        await store.close()
    paths = spans.paths()
    for call in ("Attend", "Propose", "Answer", "Ready"):
        assert ["Join", call, f"Membership/{call}"] in paths, paths
    written = [path for path in paths if path[-1].startswith("etcd") and path[0] == "Join"]
    assert ["Join", "Attend", "Membership/Attend", "etcd, once"] in written, paths
    # The generation's decision is written for the last answer to its proposal.
    assert ["Join", "Answer", "Membership/Answer", "etcd, once"] in written, paths
    assert len(spans.named("Join")) == 2
    assert ["Leave", "Membership/Leave"] in paths, paths
    assert not any(path[0] == "Join" and "Leave" in path for path in paths)


async def _joins_and_leaves(world: Served) -> None:
    members = [world.client(name) for name in ("w0", "w1")]
    for member in members:
        await asyncio.to_thread(member.join)
        await asyncio.to_thread(propose, member)
    await asyncio.gather(*(entered(member, 0) for member in members))
    for member in members:
        await asyncio.to_thread(lambda m=member: m.leave(completed=True, reason="all is trained"))


async def test_a_write_is_part_of_the_trace_of_its_call(spans: Spans, tmp_path: Path) -> None:
    """A write to etcd begins within the span of its call, even if the write waited for another one.
    The call may end before the write does: the watch may report the change before etcd answers."""
    with running_etcd(tmp_path) as etcd:
        store = EtcdClient(EtcdConfig(endpoints=(etcd,)))
        async with served(store) as world:
            members = [world.client(f"w{n}", desired=8) for n in range(8)]
            await asyncio.gather(*(asyncio.to_thread(member.join) for member in members))
        await store.close()
    by_id = {span.context.span_id: span for span in spans.finished}
    writes = [span for span in spans.finished if span.name.startswith("etcd")]
    assert writes
    for write in writes:
        caller = by_id[write.parent.span_id]
        assert caller.start_time <= write.start_time <= caller.end_time


def test_no_trace_is_carried_while_traces_are_off() -> None:
    assert tracing.current_traceparent() == ""
    with tracing.span("x"):
        assert tracing.current_traceparent() == ""
    with tracing.OngoingSpan("x") as ongoing, ongoing.within():
        assert tracing.current_traceparent() == ""


SENDS = """
import sys
from shoal_proto.traces import tracing
tracing.from_environment("worker")
with tracing.span("Push"):
    pass
"""


def test_spans_are_exported_over_otlp_with_a_service_name() -> None:
    """Spans are exported over HTTP to the endpoint in OpenTelemetry's variable if SHOAL_TRACES is
    `otlp`."""
    received: list[ExportTraceServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        given = {"SHOAL_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        subprocess.run([sys.executable, "-c", SENDS], env={**os.environ, **given}, check=True)
        server.shutdown()
        serving.join()
    [request] = received
    [resource] = request.resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert names["service.name"] == "shoal worker"
    assert [span.name for span in resource.scope_spans[0].spans] == ["Push"]


def test_an_unknown_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, "jaeger")
    with pytest.raises(InvalidSpec, match="SHOAL_TRACES has an unknown value"):
        tracing.from_environment("worker")
