"""Output of members, which their launchers send while a client reads it."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request

from shoal_proto.errors import AccessDenied
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.serving.access.roles import READS_OUTPUT
from shoal_server.status.access.guard import Guard
from shoal_server.status.http.errors import ErrorBody
from shoal_server.status.http.protocol import caller_in
from shoal_server.status.source import StatusSource
from shoal_server.status.views import OutputView

JobName = Annotated[str, Path(max_length=MAX_NAME_LENGTH, description="Name of the job.")]
MemberId = Annotated[str, Path(max_length=MAX_NAME_LENGTH, description="Id of the member.")]
_POSITION = "[0-9a-f]{1,64}-[0-9]{1,16}"
REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Both `after` and `before` are given."},
    403: {"model": ErrorBody, "description": "The caller's role may not read output."},
    404: {"model": ErrorBody, "description": "No such job, or no such output."},
    422: {"model": ErrorBody, "description": "A position that is not from an earlier answer."},
    503: {"model": ErrorBody, "description": "The launcher does not answer, or no one leads."},
}


def router(source: StatusSource, guard: Guard) -> APIRouter:
    """Endpoint for operators and viewers."""
    api = APIRouter(prefix="/api/v1")

    @api.get(
        "/jobs/{job}/members/{member}/output",
        summary="Output of a member",
        tags=["members"],
        responses=REFUSED,
    )
    async def output(
        job: JobName,
        member: MemberId,
        request: Request,
        after: Annotated[
            str | None, Query(pattern=f"^{_POSITION}$", description="Only later lines.")
        ] = None,
        before: Annotated[
            str | None, Query(pattern=f"^{_POSITION}$", description="Only earlier lines.")
        ] = None,
    ) -> OutputView:
        """Lines of stdout and stderr, as the member's launcher keeps them: the newest lines, or the
        lines after or before a position."""
        return await source.output(job, member, _asker(guard, request), after, before)

    return api


def _asker(guard: Guard, request: Request) -> CallerProof:
    """Return the caller's proof. Raises AccessDenied if its certificate is of a role that must not
    read output."""
    if not guard.is_open:
        # The holder of any token may read, and so may the cluster's own user.
        return CallerProof(is_known=True)
    caller = caller_in(request.scope)
    if caller is None:  # without TLS
        return CallerProof()
    if caller.role not in READS_OUTPUT:
        raise AccessDenied(
            f"output of members is not for a {caller.role.value}",
            seen=f"the certificate of {caller}",
            expected=f"the role {' or '.join(sorted(r.value for r in READS_OUTPUT))}",
        )
    return CallerProof(is_known=True)
