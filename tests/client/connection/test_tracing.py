"""Traces from a worker's calls through the servers to etcd, in OpenTelemetry's own exporter."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.clusters.etcd_fixture import running_etcd
from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import InvalidSpec
from shoal_proto.traces import tracing
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

SCHEMA = [ParameterSpec(name="w", shape=[100], dtype="float32")]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """All that was traced in this process, servers included."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def filled(value: float) -> memoryview:
    return memoryview(array("f", [value]) * 100).cast("B")


def path_to(span: ReadableSpan, spans: list[ReadableSpan]) -> list[str]:
    """Names from the root of its trace to the span."""
    by_id = {each.context.span_id: each for each in spans if each.context is not None}
    names = [span.name]
    while span.parent is not None:
        span = by_id[span.parent.span_id]
        names.append(span.name)
    return names[::-1]


def test_calls_and_pushes_are_traces_to_etcd(spans: InMemorySpanExporter, tmp_path: Path) -> None:
    """A placing and a push, each a trace: the caller's span, the server's in it, then etcd's."""
    with running_etcd(tmp_path) as etcd, ParameterServers(2, etcd=etcd) as servers:
        token = servers.admit("w0")
        client = ParameterClient([servers.coordinator], lambda: token, timeout_s=30.0)
        client.place(SCHEMA)
        client.create(SGD, {"w": filled(0.0)})
        values = filled(9.0)
        client.push({"w": filled(-1.0)}, into={"w": values})
        assert set(values.cast("f")) == {1.0}
        client.close()
    found = list(spans.get_finished_spans())
    paths = [path_to(span, found) for span in found]
    assert ["Push", "Parameters/Push"] in paths
    placing = [path for path in paths if path[:2] == ["Place", "Shards/Place"]]
    assert any(path[-1].startswith("etcd") for path in placing), paths


def test_nothing_is_said_while_traces_are_off() -> None:
    assert tracing.carried() == ""
    with tracing.span("x"):
        assert tracing.carried() == ""


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.VARIABLE, "jaeger")
    with pytest.raises(InvalidSpec, match="SHOAL_TRACES has an unknown value"):
        tracing.from_environment()
