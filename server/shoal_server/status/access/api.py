"""Endpoints for the page's login, and for actions of operators."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

from annotated_types import MaxLen, MinLen
from fastapi import APIRouter, Body, Path, Request, Response
from pydantic import ConfigDict

from shoal_proto.errors import AccessDenied
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.access.guard import OWN_USER, Guard, header, session_of
from shoal_server.status.access.sessions import cookie
from shoal_server.status.access.tokens import MAX_TOKEN_LENGTH
from shoal_server.status.http.errors import ErrorBody, answer

MAX_REASON = 1000
JobName = Annotated[str, Path(max_length=MAX_NAME_LENGTH, description="Name of the job.")]
MemberId = Annotated[str, Path(max_length=MAX_NAME_LENGTH, description="Id of the member.")]
REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The job's state does not allow it."},
    401: {"model": ErrorBody, "description": "No token, or an unknown one."},
    403: {"model": ErrorBody, "description": "Not an operator, or a page of another site."},
    404: {"model": ErrorBody, "description": "No such job or member."},
    408: {"model": ErrorBody, "description": "The body did not arrive in time."},
    409: {
        "model": ErrorBody,
        "description": "The job is over, lost or quarantined, or another process has taken the "
        "member's name.",
    },
    413: {"model": ErrorBody, "description": "The body is larger than 64 KiB."},
    422: {"model": ErrorBody, "description": "A field is missing, unknown or out of range."},
    503: {"model": ErrorBody, "description": "Not leading, or without etcd."},
}


class Operations(Protocol):
    """Operations that an operator may request. All raise subclasses of ShoalError."""

    async def stop(self, job: str, reason: str, who: CallerProof) -> object:
        """Have a job's members end at a step boundary."""
        ...

    async def retry(self, job: str, who: CallerProof) -> object:
        """Allow members to join a job that failed, was stopped or is lost."""
        ...

    async def snapshot(self, job: str, who: CallerProof) -> object:
        """Take a snapshot of a job's parameters at the coordinator's --snapshot-url."""
        ...

    async def drain(self, job: str, member_id: str, reason: str, who: CallerProof) -> object:
        """Let a member finish its step, hand over and leave."""
        ...


_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class Login:
    """Fields of the page's login form."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    token: Annotated[str, MinLen(1), MaxLen(MAX_TOKEN_LENGTH)]
    """Token that `shoal token create` printed."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Reason that an operator gives for an action."""

    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG
    reason: Annotated[str, MaxLen(MAX_REASON)] = ""
    """Text for the job's events."""


OptionalReason = Annotated[Reason, Body()]
_NO_REASON = Reason()


@dataclass(frozen=True, kw_only=True)
class SessionView:
    """Identity of the caller."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(use_attribute_docstrings=True)
    name: str
    """Name of the caller's token; empty if the caller needs no token, or is not known."""
    role: str
    """viewer or operator; empty without a token."""
    asks_for_token: bool
    """True if this server requires a token of this caller."""
    may_act: bool = False
    """True if the caller may stop jobs, drain members and take snapshots."""


def router(guard: Guard, operations: Operations | None) -> APIRouter:
    """Routes of sessions and, if `operations` is given, of operations."""
    api = APIRouter(prefix="/api/v1")
    _add_session(api, guard, has_operations=operations is not None)
    if operations is not None:
        _add_operations(api, operations, CallerProof(is_known=not guard.is_open))
    return api


def _add_session(api: APIRouter, guard: Guard, *, has_operations: bool) -> None:
    @api.get("/session", summary="The caller", tags=["access"])
    async def session(request: Request) -> SessionView:
        """Holder of the token or session in the request."""
        holder = guard.holder(request.scope)
        may_act = has_operations and holder is not None and holder.role.may_act()
        asks = not guard.is_open and holder is not OWN_USER
        if not asks or holder is None:
            return SessionView(name="", role="", asks_for_token=asks, may_act=may_act)
        role = holder.role.value
        return SessionView(name=holder.name, role=role, asks_for_token=True, may_act=may_act)

    @api.post("/session", summary="Log in", tags=["access"], status_code=204, responses=REFUSED)
    async def log_in(login: Login, request: Request) -> Response:
        """Begin a session of the page: a cookie that scripts cannot read, for twelve hours."""
        holder = None if guard.tokens is None else guard.tokens.holder(login.token)
        if holder is None or guard.sessions is None:
            return answer(AccessDenied("that token is not known"), 401)
        secret = guard.sessions.begin(holder)
        return _with_cookie(secret, request)

    other_site: dict[int | str, dict[str, Any]] = {403: REFUSED[403]}

    @api.delete(
        "/session", summary="Log out", tags=["access"], status_code=204, responses=other_site
    )
    async def log_out(request: Request) -> Response:
        """End the session."""
        if guard.sessions is not None:
            guard.sessions.end(session_of(request.scope))
        return _with_cookie("", request)


def _with_cookie(secret: str, request: Request) -> Response:
    is_https = request.url.scheme == "https"
    made = cookie(secret, header(request.scope, b"host"), is_https=is_https)
    return Response(status_code=204, headers={"Set-Cookie": made})


def _add_operations(api: APIRouter, operations: Operations, who: CallerProof) -> None:
    options: dict[str, Any] = {"tags": ["operations"], "status_code": 204, "responses": REFUSED}

    @api.post("/jobs/{job}/stop", summary="Stop a job", **options)
    async def stop(job: JobName, reason: OptionalReason = _NO_REASON) -> None:
        """Have the job's members end at a step boundary."""
        await operations.stop(job, reason.reason, who)

    @api.post("/jobs/{job}/retry", summary="Allow joins again", **options)
    async def retry(job: JobName) -> None:
        """Allow members to join a job that failed, was stopped or is lost."""
        await operations.retry(job, who)

    @api.post("/jobs/{job}/snapshot", summary="Take a snapshot", **options)
    async def snapshot(job: JobName) -> None:
        """Save all parameters of a job as of one moment; answered once the snapshot is complete."""
        await operations.snapshot(job, who)

    @api.post("/jobs/{job}/members/{member}/drain", summary="Drain a member", **options)
    async def drain(job: JobName, member: MemberId, reason: OptionalReason = _NO_REASON) -> None:
        """Have the member finish its step, hand over and leave."""
        await operations.drain(job, member, reason.reason, who)
