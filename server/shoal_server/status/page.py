"""The live page: a few static files, and a stream of what they show."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import RootModel, TypeAdapter

from shoal_proto.errors import ShoalError
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.status.http.streams import LiveResponse, LiveStreams
from shoal_server.status.reading import JobDetail, JobSummary, StatusQueries
from shoal_server.status.views import EventView, Readiness, ShardsView, View

log = structlog.get_logger(__name__)

TICK_S = 1.0
MAX_SHOWN_EVENTS = 100
_TYPES = {
    "index.html": "text/html",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "login.js": "text/javascript",
    "page.css": "text/css",
}
_HEADERS = {
    # Nothing but the page's own files runs or is fetched, whatever a name or an error says.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class PageState(View):
    """All that the page shows at one moment."""

    now_unix_s: float
    readiness: Readiness
    jobs: tuple[JobSummary, ...]
    job: JobDetail | None
    """The job that is looked at; null if there is none of that name."""
    shards: ShardsView | None
    shards_error: str
    """Why the shards could not be read."""
    events: tuple[EventView, ...]
    """The newest 100, in order."""


_STATE = TypeAdapter(PageState)


def router(reading: StatusQueries, streams: LiveStreams) -> APIRouter:
    """`/`, its scripts and style, and `/api/v1/stream`."""
    page, states = APIRouter(), _SharedStates(reading)
    for name in _TYPES:
        _add_file(page, "/" if name == "index.html" else f"/{name}", name)

    @page.get(
        "/api/v1/stream",
        summary="Live state",
        tags=["page"],
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "model": RootModel[Any]}},
    )
    async def stream(
        job: Annotated[
            str, Query(max_length=MAX_NAME_LENGTH, description="The job to look at.")
        ] = "",
    ) -> LiveResponse:
        """Server-sent events: `state` once a second, with everything the page shows as JSON."""
        return LiveResponse(streams, _states(states, streams.closing, job))

    return page


def _add_file(page: APIRouter, path: str, name: str) -> None:
    content = files("shoal_server.status").joinpath("assets", name).read_bytes()

    @page.get(path, include_in_schema=False)
    async def serve() -> Response:
        return Response(content, media_type=_TYPES[name], headers=_HEADERS)


class _SharedStates:
    """What pages show, made once for all that look at the same job at the same moment."""

    def __init__(self, reading: StatusQueries) -> None:
        self._reading = reading
        self._made: dict[str, tuple[float, asyncio.Future[bytes]]] = {}

    async def newest(self, job: str) -> bytes:
        """As JSON, half a tick old at most."""
        now_s = asyncio.get_running_loop().time()
        made = self._made.get(job)
        if made is None or now_s - made[0] >= TICK_S / 2:
            old = [name for name, (at_s, _) in self._made.items() if now_s - at_s > TICK_S]
            for name in old:
                del self._made[name]
            made = self._made[job] = (now_s, asyncio.ensure_future(self._make(job)))
        # Who hangs up meanwhile takes it from nobody else.
        return await asyncio.shield(made[1])

    async def _make(self, job: str) -> bytes:
        return _STATE.dump_json(await page_state(self._reading, job))


async def _states(states: _SharedStates, closing: asyncio.Event, job: str) -> AsyncIterator[bytes]:
    while not closing.is_set():
        yield b"event: state\ndata: " + await states.newest(job) + b"\n\n"
        try:
            await asyncio.wait_for(closing.wait(), TICK_S)
        except TimeoutError:
            continue


async def page_state(reading: StatusQueries, name: str) -> PageState:
    """What the page shows now, with `name` as the job that is looked at."""
    jobs = sorted(reading.source.jobs(), key=lambda job: job.job)
    job = reading.source.job(name)
    shards, shards_error = None, ""
    if job is not None:
        try:
            shards = await reading.source.shards(name)
        except ShoalError as error:
            shards_error = str(error)
    return PageState(
        now_unix_s=time.time(),
        readiness=reading.source.readiness(),
        jobs=tuple(reading.summary(job) for job in jobs),
        job=reading.detail(job) if job else None,
        shards=shards,
        shards_error=shards_error,
        events=tuple(reading.board.last_events(name, MAX_SHOWN_EVENTS)) if job else (),
    )
