"""The FastAPI app of a coordinator's status endpoint."""

from dataclasses import replace

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shoal_server.serving.admission.calls import CallCounts
from shoal_server.serving.loop_lag import LoopLag
from shoal_server.status import api, metrics, outputs, page
from shoal_server.status.access import api as access_api
from shoal_server.status.access.api import Operations
from shoal_server.status.access.guard import AccessControl, Guard
from shoal_server.status.board import StatusBoard
from shoal_server.status.http import errors
from shoal_server.status.http.bounds import HttpBounds
from shoal_server.status.http.hosts import AllowedHosts, HostCheck
from shoal_server.status.port_metrics import PortMetrics
from shoal_server.status.reading import StatusQueries
from shoal_server.status.source import StatusSource
from shoal_server.status.views import Readiness

DESCRIPTION = """State of a Shoal coordinator: jobs, members, generations with their reasons,
parameter shards and events. Workers report their health here. Every failure is answered with JSON:
`kind`, `what`, `seen`, `expected`, `fix`. Liveness of members never depends on this API."""


def build_app(
    source: StatusSource,
    board: StatusBoard,
    measures: metrics.ProcessMeasures | None = None,
    *,
    bounds: HttpBounds | None = None,
    calls: CallCounts | None = None,
    hosts: AllowedHosts | None = None,
    guard: Guard | None = None,
    operations: Operations | None = None,
) -> FastAPI:
    """Make an app that shows `source` and `board`; serve it with `serve.StatusServer`, on their
    event loop. `guard`: decides which callers are admitted; by default all are."""
    bounds, guard = bounds or HttpBounds(), guard or Guard()
    # Off, because FastAPI's own pages load scripts from a CDN.
    app = FastAPI(
        title="Shoal",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    reading = StatusQueries(source, board)
    app.state.bounds, app.state.loop_lag = bounds, LoopLag()
    errors.install(app, bounds.limits.http_request_s)
    app.add_middleware(AccessControl, guard=guard)
    app.add_middleware(HostCheck, allowed=hosts or AllowedHosts())
    app.include_router(api.router(reading))
    app.include_router(access_api.router(guard, operations))
    app.include_router(outputs.router(source, guard))
    app.include_router(page.router(reading, bounds.streams, guard))
    ports = PortMetrics(bounds=bounds, calls=calls or CallCounts())
    measures = measures or metrics.ProcessMeasures()
    _add_probes(app, reading, replace(measures, loop_lag=app.state.loop_lag, ports=ports))
    return app


def _add_probes(app: FastAPI, reading: StatusQueries, measures: metrics.ProcessMeasures) -> None:
    @app.get("/healthz", summary="Alive?", tags=["probes"], response_class=PlainTextResponse)
    async def healthz() -> str:
        """200 while the process serves at all."""
        return "ok\n"

    @app.get(
        "/readyz",
        summary="Ready?",
        tags=["probes"],
        responses={503: {"model": Readiness, "description": "Not leading, or without etcd."}},
    )
    async def readyz(response: Response, standby: bool = False) -> Readiness:
        """200 while this coordinator leads; 503 with the reason otherwise. With `standby`, also 200
        while another coordinator is known to lead, from which this one would take over."""
        readiness = reading.source.readiness()
        stands_by = standby and bool(readiness.leader)
        response.status_code = 200 if readiness.ready or stands_by else 503
        return readiness

    @app.get("/metrics", summary="Prometheus metrics", tags=["probes"], response_class=Response)
    async def prometheus() -> Response:
        """Metrics, computed for each request; names end in their unit."""
        return Response(await metrics.render(reading, measures), media_type=CONTENT_TYPE_LATEST)
