"""Traces by OpenTelemetry, from a worker's call through the servers to etcd. Off by default.

SHOAL_TRACES=otlp sends spans by OTLP over HTTP. A program with its own OpenTelemetry calls `use`.
The token of a request carries its caller's span.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

from shoal_proto.errors import InvalidSpec

VARIABLE = "SHOAL_TRACES"
_HEADER = "traceparent"


class _Tracing:
    tracer: Any = None
    """None: traces are off."""


class Carrier(Protocol):
    """A message that carries its caller's span: a token."""

    traceparent: str


def from_environment(part: str) -> None:
    """Turn traces on if the environment asks for them, for a service named `shoal PART` (or
    OTEL_SERVICE_NAME). Raises InvalidSpec for an unknown value or a missing package."""
    mode = os.environ.get(VARIABLE, "")
    if not mode or _Tracing.tracer is not None:
        return
    if mode != "otlp":
        raise InvalidSpec(f"{VARIABLE} has an unknown value", seen=mode, expected="otlp, or unset")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise InvalidSpec(
            "traces need a package that is not installed",
            seen=str(error),
            expected="the packages of the extra `traces`",
            fix="pip install 'shoal[traces]'",
        ) from None
    named = (
        {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"shoal {part}".rstrip()}
    )
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(provider)


def use(provider: Any) -> None:
    """Send spans to this OpenTelemetry TracerProvider; None: turn traces off."""
    _Tracing.tracer = None if provider is None else provider.get_tracer("shoal")


@contextmanager
def span(name: str, token: Carrier | None = None) -> Iterator[None]:
    """Make a span around the block. `token`: token of a received call, whose span becomes the
    parent. Costs nothing while traces are off."""
    tracer = _Tracing.tracer
    if tracer is None:
        yield
        return
    with tracer.start_as_current_span(name, context=_context(token)):
        yield


@contextmanager
def child_span(name: str) -> Iterator[None]:
    """Make a span within another span; without one, do nothing."""
    if _Tracing.tracer is None or not _carried():
        yield
        return
    with span(name):
        yield


class OngoingSpan:
    """A span over several threads or a generator. The code in its `within` blocks belongs to it."""

    def __init__(self, name: str, token: Carrier | None = None) -> None:
        tracer = _Tracing.tracer
        self._span = None if tracer is None else tracer.start_span(name, context=_context(token))

    @contextmanager
    def within(self) -> Iterator[None]:
        """Make the block part of the span, unless the span has ended."""
        span = self._span
        if span is None:
            yield
            return
        from opentelemetry.trace import use_span  # noqa: PLC0415

        with use_span(span):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()


def set_traceparent(token: Carrier) -> None:
    """Set the token's span to the current one, if traces are on."""
    if _Tracing.tracer is not None:
        token.traceparent = _carried()


def current_traceparent() -> str:
    """Return the current span, as tokens carry it; empty without one."""
    return "" if _Tracing.tracer is None else _carried()


def _carried() -> str:
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_HEADER, "")


def _context(token: Carrier | None) -> Any:
    if token is None or not token.traceparent:
        return None
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
        TraceContextTextMapPropagator,
    )

    return TraceContextTextMapPropagator().extract({_HEADER: token.traceparent})
