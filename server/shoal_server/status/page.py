"""The live page: three static files, and a stream of what they show."""

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

from shoal_proto.errors import Overloaded, ShoalError
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.status.reading import JobDetail, JobSummary, StatusQueries
from shoal_server.status.views import EventView, Readiness, ShardsView, View

log = structlog.get_logger(__name__)

TICK_S = 1.0
MAX_STREAMS = 64
MAX_SHOWN_EVENTS = 100
_TYPES = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
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


class Closing:
    """Set when the server stops, so that streams end and do not hold it up."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.num_streams = 0


def router(reading: StatusQueries, closing: Closing) -> APIRouter:
    """`/`, its script and style, and `/api/v1/stream`."""
    page = APIRouter()
    for path, name in (("/", "index.html"), ("/page.js", "page.js"), ("/page.css", "page.css")):
        _add_file(page, path, name)

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
    ) -> StreamingResponse:
        """Server-sent events: `state` once a second, with everything the page shows as JSON."""
        if closing.num_streams >= MAX_STREAMS:
            raise Overloaded(
                "too many live pages are open", seen=str(MAX_STREAMS), fix="Close some of them."
            )
        return StreamingResponse(
            _states(reading, closing, job),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return page


def _add_file(page: APIRouter, path: str, name: str) -> None:
    content = files("shoal_server.status").joinpath("assets", name).read_bytes()

    @page.get(path, include_in_schema=False)
    async def serve() -> Response:
        return Response(content, media_type=_TYPES[name], headers=_HEADERS)


async def _states(reading: StatusQueries, closing: Closing, job: str) -> AsyncIterator[bytes]:
    closing.num_streams += 1
    try:
        while not closing.event.is_set():
            state = await page_state(reading, job)
            yield b"event: state\ndata: " + _STATE.dump_json(state) + b"\n\n"
            try:
                await asyncio.wait_for(closing.event.wait(), TICK_S)
            except TimeoutError:
                continue
    finally:
        closing.num_streams -= 1


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
