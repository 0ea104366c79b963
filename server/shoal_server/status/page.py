"""The live page: a few static files, and a stream of the state that they show."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest
from importlib.resources import files
from itertools import islice
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import RootModel, TypeAdapter

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.serving.json_view import View
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status.access.guard import Guard
from shoal_server.status.http.streams import LiveResponse, LiveStreams
from shoal_server.status.reading import StatusQueries
from shoal_server.status.views import (
    EventView,
    GenerationView,
    HealthView,
    JobDetail,
    JobSummary,
    MemberView,
    Readiness,
    ShardsView,
)

log = structlog.get_logger(__name__)

TICK_S = 1.0
FRESH_S = 0.9
MAX_SHOWN_EVENTS = 100
SHOWN_MEMBERS = 50
"""Number of members shown by default: first those in another state than WELL, slow ones, and ones
with an error."""
SHOWN_GENERATIONS = 30
SHOWN_CHIPS = 60
MAX_KEPT_GENERATIONS = 4096
WELL = frozenset({"training", "ready", "standby"})
SLOW = 1.5
_TYPES = {
    "index.html": "text/html",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "plot.js": "text/javascript",
    "export.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "actions.js": "text/javascript",
    "output.js": "text/javascript",
    "outputs.js": "text/javascript",
    "login.js": "text/javascript",
    "page.css": "text/css",
}
_HEADERS = {
    # Only the page's own files run, whatever text a name or an error contains.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class PageGeneration(View):
    """A generation with a part of its roster."""

    record: GenerationView
    """Record with the first 60 members of the roster, and the members in `joined`."""
    num_members: int
    joined: tuple[str, ...]
    """Members that were not in the generation before; at most 60."""
    gone: tuple[str, ...]
    """Members of the generation before that are not in this one; at most 60."""


@dataclass(frozen=True, kw_only=True)
class PageJob(View):
    """The selected job."""

    detail: JobDetail
    """Details with the members that are shown, and without generations."""
    generations: tuple[PageGeneration, ...]
    num_generations: int
    slow: tuple[str, ...]
    """Members whose steps take more than 1.5 times the median step time; at most 50, and none if
    fewer than three report step times."""
    samples_per_s: float | None
    mean_loss: float | None
    least_exchange_s: float | None = None
    """The shortest `exchange_s` of a member that trains; null for asynchronous jobs. Another
    member's excess over it is a wait for slower members."""


@dataclass(frozen=True, kw_only=True)
class PageState(View):
    """All that the page shows at one moment."""

    now_unix_s: float
    readiness: Readiness
    jobs: tuple[JobSummary, ...]
    job: PageJob | None
    shards: ShardsView | None
    shards_error: str
    """Reason for which the shards could not be read; empty if they were read."""
    events: tuple[EventView, ...]


_STATE = TypeAdapter(PageState)


def router(reading: StatusQueries, streams: LiveStreams, guard: Guard) -> APIRouter:
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
        request: Request,
        job: Annotated[str, Query(max_length=MAX_NAME_LENGTH, description="Job to show.")] = "",
        all_members: Annotated[bool, Query(description="All members, not only 50.")] = False,
    ) -> LiveResponse:
        """Server-sent events: `state` once a second, with everything the page shows as JSON, until
        the caller's token or session ends."""
        selection = PageSelection(job=job, all_members=all_members)
        is_known = partial(guard.is_known, request.scope)
        return LiveResponse(streams, _states(states, streams.closing, selection, is_known))

    return page


def _add_file(page: APIRouter, path: str, name: str) -> None:
    content = files("shoal_server.status").joinpath("assets", name).read_bytes()

    @page.get(path, include_in_schema=False)
    async def serve() -> Response:
        return Response(content, media_type=_TYPES[name], headers=_HEADERS)


@dataclass(frozen=True, kw_only=True)
class PageSelection:
    """A job to show, and some or all of its members."""

    job: str
    all_members: bool = False


class _SharedStates:
    """Newest state of each selection, shared by all pages that show the selection."""

    def __init__(self, reading: StatusQueries) -> None:
        self._maker = PageMaker(reading)
        self._made: dict[PageSelection, tuple[float, asyncio.Future[bytes]]] = {}

    async def newest(self, selection: PageSelection) -> bytes:
        """Newest state as JSON, less than a tick old."""
        now_s = asyncio.get_running_loop().time()
        made = self._made.get(selection)
        if made is None or now_s - made[0] >= FRESH_S:
            old = [which for which, (at_s, _) in self._made.items() if now_s - at_s > TICK_S]
            for which in old:
                del self._made[which]
            made = self._made[selection] = (now_s, asyncio.ensure_future(self._make(selection)))
        # A page that disconnects must not cancel it for others.
        return await asyncio.shield(made[1])

    async def _make(self, selection: PageSelection) -> bytes:
        return _STATE.dump_json(await self._maker.state(selection))


async def _states(
    states: _SharedStates,
    closing: asyncio.Event,
    selection: PageSelection,
    is_known: Callable[[], bool],
) -> AsyncIterator[bytes]:
    while not closing.is_set() and is_known():
        yield b"event: state\ndata: " + await states.newest(selection) + b"\n\n"
        try:
            await asyncio.wait_for(closing.wait(), TICK_S)
        except TimeoutError:
            continue


class PageMaker:
    """Makes states. Parts that all pages share are made at most once in FRESH_S."""

    def __init__(self, reading: StatusQueries) -> None:
        self._reading = reading
        self._jobs: tuple[float, tuple[JobSummary, ...]] = (-TICK_S, ())
        self._generations: OrderedDict[tuple[str, str, int], PageGeneration] = OrderedDict()

    async def state(self, selection: PageSelection) -> PageState:
        """State that the page shows now."""
        reading, name = self._reading, selection.job
        try:
            job = reading.source.job(name)
        except Unavailable:
            job = None  # it is only among `jobs` until it is read
        shards, shards_error = None, ""
        if job is not None:
            try:
                shards = await reading.source.shards(name)
            except ShoalError as error:
                shards_error = str(error)
        return PageState(
            now_unix_s=unix_s(),
            readiness=reading.source.readiness(),
            jobs=self._summaries(),
            job=self._job(job, all_members=selection.all_members) if job else None,
            shards=shards,
            shards_error=shards_error,
            events=tuple(reading.board.last_events(name, MAX_SHOWN_EVENTS)) if job else (),
        )

    def _summaries(self) -> tuple[JobSummary, ...]:
        made_s, summaries = self._jobs
        if time.monotonic() - made_s >= FRESH_S:
            jobs = map(self._reading.summary, self._reading.source.jobs())
            summaries = tuple(sorted(jobs, key=lambda summary: summary.job))
            self._jobs = (time.monotonic(), summaries)
        return summaries

    def _job(self, job: JobDetail, *, all_members: bool) -> PageJob:
        members = [each.member for each in job.members]
        health = {
            each.member_id: report
            for each in members
            if (report := self._reading.health(job.summary.job, each))
        }
        training = [
            report
            for each in members
            if each.state == "training" and (report := health.get(each.member_id))
        ]
        slow = _slow(health)
        cut = len(members) > SHOWN_MEMBERS and not all_members
        shown = _first(members, health, frozenset(slow)) if cut else None
        speeds = [each.samples_per_s for each in training if each.samples_per_s is not None]
        losses = [each.loss for each in training if each.loss is not None]
        losses = [loss for loss in losses if math.isfinite(loss)]
        exchanges = [each.step_parts.exchange_s for each in training if each.step_parts]
        return PageJob(
            detail=replace(self._reading.detail(job, shown), generations=()),
            generations=self._timeline(job),
            num_generations=len(job.generations),
            slow=slow,
            samples_per_s=sum(speeds) if speeds else None,
            mean_loss=sum(losses) / len(losses) if losses else None,
            least_exchange_s=min(exchanges, default=None) if job.synchronous else None,
        )

    def _timeline(self, job: JobDetail) -> tuple[PageGeneration, ...]:
        records, made = job.generations, []
        for i, record in enumerate(records[:SHOWN_GENERATIONS]):
            key = (job.summary.job, record.digest, record.generation)
            known = self._generations.pop(key, None)
            if known is None or known.record.verdict != record.verdict:
                before = next((r for r in records[i + 1 :] if r.verdict == "committed"), None)
                known = _page_generation(record, before)
            self._generations[key] = known
            made.append(known)
        while len(self._generations) > MAX_KEPT_GENERATIONS:
            self._generations.popitem(last=False)
        return tuple(made)


def _first(
    members: Sequence[MemberView], health: Mapping[str, HealthView], slow: frozenset[str]
) -> list[MemberView]:
    def order(member: MemberView) -> tuple[bool, bool, int]:
        report = health.get(member.member_id)
        warned = report is not None and bool(report.last_error)
        is_well = member.state in WELL and not warned and member.member_id not in slow
        return is_well, member.rank is None, member.rank or 0

    return nsmallest(SHOWN_MEMBERS, members, key=order)


def _slow(health: Mapping[str, HealthView]) -> tuple[str, ...]:
    times = {name: t for name, report in health.items() if (t := report.step_time_s) is not None}
    if len(times) < 3:
        return ()
    middle_s = sorted(times.values())[len(times) // 2]
    found = (name for name, step_s in times.items() if step_s > SLOW * middle_s)
    return tuple(islice(found, SHOWN_MEMBERS))


def _page_generation(record: GenerationView, before: GenerationView | None) -> PageGeneration:
    ids = {each.member_id for each in record.members}
    old = {each.member_id for each in before.members} if before is not None else ids
    joined = [each for each in record.members if each.member_id not in old][:SHOWN_CHIPS]
    shown = {each.member_id: each for each in (*joined, *record.members[:SHOWN_CHIPS])}
    members = sorted(shown.values(), key=lambda each: each.rank)
    return PageGeneration(
        record=replace(record, members=tuple(members)),
        num_members=len(ids),
        joined=tuple(each.member_id for each in joined),
        gone=tuple(sorted(old - ids)[:SHOWN_CHIPS]),
    )
