"""Errors over HTTP: always JSON with `kind`, `what`, `seen`, `expected` and `fix`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal_proto.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    JobFinished,
    JobStopped,
    MalformedMessage,
    Overloaded,
    RefusedError,
    RetryError,
    ShoalError,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
    UnknownShard,
)

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 64 * 1024

# First match wins, so the narrow classes stand before their parents.
_STATUSES: tuple[tuple[type[ShoalError], int], ...] = (
    (UnknownJob, 404),
    (UnknownMember, 404),
    (UnknownGeneration, 404),
    (UnknownShard, 404),
    (Fenced, 409),
    (JobFinished, 409),
    (JobStopped, 409),
    (MalformedMessage, 422),
    (RefusedError, 400),
    (Overloaded, 503),
    (DeadlineExceeded, 504),
    (RetryError, 503),
    (ShoalError, 500),
)


class ErrorBody(BaseModel):
    """What went wrong, in parts."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "kind": "UnknownMember",
                    "what": "job digits has no member w7",
                    "seen": "w7",
                    "expected": "one of w0, w1, w2",
                    "fix": "GET /api/v1/jobs/digits/members lists the members.",
                }
            ]
        },
    )

    kind: str
    """Name of the class in shoal_proto.errors."""
    what: str
    seen: str = ""
    expected: str = ""
    fix: str = ""


def answer(error: ShoalError, status: int | None = None) -> JSONResponse:
    """The HTTP answer that tells of an error."""
    if status is None:
        status = next(code for kind, code in _STATUSES if isinstance(error, kind))
    body = ErrorBody(
        kind=type(error).__name__,
        what=error.what,
        seen=error.seen,
        expected=error.expected,
        fix=error.fix,
    )
    return JSONResponse(body.model_dump(), status_code=status)


def install(app: FastAPI) -> None:
    """Make the app answer every failure in this form, and refuse bodies above 64 KiB."""

    @app.exception_handler(ShoalError)
    async def refused(request: Request, error: ShoalError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(_from_validation(error.errors(), request.url.path))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            what = f"there is nothing at {request.url.path}"
        else:
            what = f"{request.method} {request.url.path}: {error.detail}"
        refusal = RefusedError(what, fix="GET /openapi.json lists what there is.")
        return answer(refusal, error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        log.error("http_request_failed", path=request.url.path, exc_info=error)
        return answer(InternalError("the coordinator failed on this request", seen=repr(error)))

    app.add_middleware(BodyLimit)


def _from_validation(errors: Sequence[Any], path: str) -> MalformedMessage:
    """One error of all that pydantic found, each with its field, what it saw and what it wants."""
    wrong = [e for e in errors[:8] if e["type"] != "json_invalid"]
    if not wrong:
        reason = errors[0].get("ctx", {}).get("error", "")
        return MalformedMessage(
            f"the body of {path} is not JSON", seen=reason, expected="a JSON object"
        )
    fields = [".".join(str(part) for part in e["loc"][1:]) or str(e["loc"][0]) for e in wrong]
    seen = [
        f"no {field}" if e["type"] == "missing" else f"{field} = {_brief(e['input'])}"
        for field, e in zip(fields, wrong, strict=True)
    ]
    return MalformedMessage(
        f"{', '.join(fields)} of the request to {path} cannot be taken",
        seen="; ".join(seen),
        expected="; ".join(f"{f}: {_rule(e)}" for f, e in zip(fields, wrong, strict=True)),
        fix="GET /openapi.json describes every field.",
    )


def _rule(error: Mapping[str, Any]) -> str:
    # pydantic speaks of a dataclass as of a call.
    unknown = error["type"] == "unexpected_keyword_argument"
    return "no field of that name" if unknown else str(error["msg"])


def _brief(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


class BodyLimit:
    """Answers 413 as soon as a body grows beyond 64 KiB, before anything holds it in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen_bytes = 0

        async def limited() -> Message:
            nonlocal seen_bytes
            message = await receive()
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)
