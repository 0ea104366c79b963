"""The endpoints under /api/v1."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from shoal_proto.health import MAX_COUNT
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.status.board import MAX_EVENTS
from shoal_server.status.health import HealthReport
from shoal_server.status.http.errors import ErrorBody
from shoal_server.status.reading import EventsView, HistoryView, StatusQueries, WaitView
from shoal_server.status.views import (
    GenerationView,
    JobDetail,
    JobSummary,
    MemberDetail,
    MemberView,
    PublishedSeriesView,
    ShardsView,
)

Responses = dict[int | str, dict[str, Any]]

JobName = Annotated[
    str, Path(max_length=MAX_NAME_LENGTH, description="Name of the job.", examples=["digits"])
]
MemberId = Annotated[
    str, Path(max_length=MAX_NAME_LENGTH, description="Id of the member.", examples=["w0"])
]
NOT_FOUND: Responses = {
    404: {"model": ErrorBody, "description": "No such job, member or generation."}
}
REPORT_REFUSED: Responses = {
    **NOT_FOUND,
    409: {"model": ErrorBody, "description": "The incarnation is not the member's."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    413: {"model": ErrorBody, "description": "The body is larger than 64 KiB."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of range."},
}
AWAY: Responses = {503: {"model": ErrorBody, "description": "Not leading, or without etcd."}}
MEMBER_UNREADY: Responses = {
    **NOT_FOUND,
    **AWAY,
    409: {"model": MemberView | ErrorBody, "description": "Not ready."},
}
GENERATIONS_UNREAD: Responses = {
    **NOT_FOUND,
    **AWAY,
    409: {"model": ErrorBody, "description": "The job's records in etcd cannot be read."},
}


def router(reading: StatusQueries) -> APIRouter:
    """Endpoints under /api/v1. Handlers are coroutines, so that only the event loop uses the
    board."""
    api = APIRouter(prefix="/api/v1")
    _add_jobs(api, reading)
    _add_weights(api, reading)
    _add_members(api, reading)
    _add_history(api, reading)
    return api


def _add_jobs(api: APIRouter, reading: StatusQueries) -> None:
    @api.get("/jobs", summary="All jobs", tags=["jobs"], responses=AWAY)
    async def jobs() -> list[JobSummary]:
        """Every job this coordinator knows, by name."""
        return sorted(map(reading.summary, reading.jobs()), key=lambda summary: summary.job)

    @api.get("/jobs/{job}", summary="One job", tags=["jobs"], responses=NOT_FOUND)
    async def job(job: JobName) -> JobDetail:
        """A job with its members, newest generations and samples."""
        return reading.detail(reading.job(job))

    @api.get(
        "/jobs/{job}/shards",
        summary="Parameter shards",
        tags=["jobs"],
        responses={**NOT_FOUND, **AWAY},
    )
    async def shards(job: JobName) -> ShardsView:
        """Placement of the job's parameters, and the state of each shard; at most a second old."""
        reading.job(job)
        return await reading.source.shards(job) or ShardsView(servers=(), shards=())


def _add_weights(api: APIRouter, reading: StatusQueries) -> None:
    @api.get("/weights", summary="Published weights", tags=["weights"])
    async def weights() -> Sequence[PublishedSeriesView]:
        """Every series of published weights, of jobs and of plain scripts, with its kept versions
        and with what each reader has installed."""
        return reading.source.weights()


def _add_members(api: APIRouter, reading: StatusQueries) -> None:
    @api.get("/jobs/{job}/members", summary="Members", tags=["members"], responses=NOT_FOUND)
    async def members(job: JobName) -> list[MemberDetail]:
        """The members of a job by rank; members without a rank last."""
        return list(reading.detail(reading.job(job)).members)

    @api.get(
        "/jobs/{job}/members/{member}", summary="Member", tags=["members"], responses=NOT_FOUND
    )
    async def member(job: JobName, member: MemberId) -> MemberDetail:
        """A member with its last health report."""
        return reading.member_detail(job, reading.member(job, member))

    @api.get(
        "/jobs/{job}/members/{member}/readyz",
        summary="Ready?",
        tags=["members"],
        responses=MEMBER_UNREADY,
    )
    async def readyz(job: JobName, member: MemberId, response: Response) -> MemberView:
        """200 if the member trains, holds the job's state or is on standby; 409 while it loads its
        model or receives the state. For probes: until then, no other member may be ended for it."""
        found = reading.member(job, member)
        response.status_code = 200 if found.takes_part else 409
        return found

    @api.get(
        "/jobs/{job}/members/{member}/why",
        summary="What is it waiting for?",
        tags=["members"],
        responses=NOT_FOUND,
    )
    async def why(job: JobName, member: MemberId) -> WaitView:
        """Reason and start of the member's wait, and the state of its job."""
        return await reading.why(job, member)

    @api.post(
        "/jobs/{job}/members/{member}/health",
        summary="Report health",
        tags=["members"],
        status_code=204,
        responses=REPORT_REFUSED,
    )
    async def report(job: JobName, member: MemberId, health: HealthReport) -> None:
        """Keep a worker's report, which it posts about once a second. The report is only displayed,
        and has no effect on liveness.

        The latest report and the newest losses of each member are kept.
        """
        reading.report(job, member, health)


def _add_history(api: APIRouter, reading: StatusQueries) -> None:
    @api.get(
        "/jobs/{job}/generations",
        summary="Generations",
        tags=["history"],
        responses=GENERATIONS_UNREAD,
    )
    async def generations(job: JobName) -> Sequence[GenerationView]:
        """The newest decided generations, committed and aborted, newest first."""
        return await reading.generations(job)

    @api.get(
        "/jobs/{job}/generations/{generation}",
        summary="One generation",
        tags=["history"],
        responses=GENERATIONS_UNREAD,
    )
    async def generation(
        job: JobName, generation: Annotated[int, Path(ge=1, le=MAX_COUNT)]
    ) -> GenerationView:
        """The record of a decided generation, committed or aborted."""
        return await reading.generation(job, generation)

    @api.get("/jobs/{job}/events", summary="Events", tags=["history"], responses=NOT_FOUND)
    async def events(
        job: JobName,
        after: Annotated[int, Query(ge=0, le=MAX_COUNT, description="Only ids above this.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100,
        details: Annotated[
            bool,
            Query(description="Include events that another event sums up in one line."),
        ] = True,
    ) -> EventsView:
        """Events of the job, oldest first; the newest 1000 are kept."""
        return reading.events(job, after, limit, details=details)

    @api.get("/jobs/{job}/history", summary="Charts", tags=["history"], responses=NOT_FOUND)
    async def history(
        job: JobName,
        last_s: Annotated[
            float,
            Query(
                ge=0,
                le=MAX_COUNT,
                description="Only so many of the newest seconds, in shorter intervals; 0: all.",
            ),
        ] = 0,
    ) -> HistoryView:
        """Loss, throughput, step times and staleness over the job's life, and its changes."""
        return reading.history(job, last_s)
