"""The FastAPI app of a coordinator, built from what it shows."""

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shoal_server.serving.loop_lag import LoopLag
from shoal_server.status import api, errors, metrics, page
from shoal_server.status.board import StatusBoard
from shoal_server.status.reading import StatusQueries
from shoal_server.status.source import StatusSource
from shoal_server.status.views import Readiness

DESCRIPTION = """What a Shoal coordinator knows: jobs, members, generations with their reasons,
parameter shards and events. Workers report their health here. Every failure is answered with JSON:
`kind`, `what`, `seen`, `expected`, `fix`. Liveness of members never depends on this API."""


def build_app(source: StatusSource, board: StatusBoard) -> FastAPI:
    """An app that shows `source` and `board`; serve it with `serve.StatusServer`.

    It must run on the event loop that source and board belong to.
    """
    # The pages that FastAPI offers for its schema load scripts from a CDN: they stay off.
    app = FastAPI(title="Shoal", description=DESCRIPTION, docs_url=None, redoc_url=None)
    reading = StatusQueries(source, board)
    app.state.closing = page.Closing()
    app.state.loop_lag = LoopLag()
    errors.install(app)
    app.include_router(api.router(reading))
    app.include_router(page.router(reading, app.state.closing))
    _add_probes(app, reading, app.state.loop_lag)
    return app


def _add_probes(app: FastAPI, reading: StatusQueries, loop_lag: LoopLag) -> None:
    @app.get("/healthz", summary="Alive?", tags=["probes"], response_class=PlainTextResponse)
    async def healthz() -> str:
        """200 while the process serves at all."""
        return "ok\n"

    @app.get(
        "/readyz",
        summary="Ready?",
        tags=["probes"],
        responses={503: {"model": Readiness, "description": "Not leading, or etcd is away."}},
    )
    async def readyz(response: Response) -> Readiness:
        """200 while this coordinator leads and reaches etcd; 503 with the reason otherwise."""
        readiness = reading.source.readiness()
        response.status_code = 200 if readiness.ready else 503
        return readiness

    @app.get("/metrics", summary="Prometheus metrics", tags=["probes"], response_class=Response)
    async def prometheus() -> Response:
        """Computed when asked for; names end in their unit."""
        return Response(await metrics.render(reading, loop_lag), media_type=CONTENT_TYPE_LATEST)
