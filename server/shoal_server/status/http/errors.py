"""Errors over HTTP: always JSON with `kind`, `what`, `seen`, `expected` and `fix`."""

import asyncio
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
    AccessDenied,
    DeadlineExceeded,
    Fenced,
    InternalError,
    JobFinished,
    JobQuarantined,
    JobStopped,
    MalformedMessage,
    Overloaded,
    RefusedError,
    RetryError,
    ShoalError,
    StateLost,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
    UnknownShard,
)

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 64 * 1024

# The first match wins, so subclasses come first.
_STATUSES: tuple[tuple[type[ShoalError], int], ...] = (
    (UnknownJob, 404),
    (UnknownMember, 404),
    (UnknownGeneration, 404),
    (UnknownShard, 404),
    (AccessDenied, 403),
    (Fenced, 409),
    (JobFinished, 409),
    (JobStopped, 409),
    (StateLost, 409),
    (JobQuarantined, 409),
    (MalformedMessage, 422),
    (RefusedError, 400),
    (Overloaded, 503),
    (DeadlineExceeded, 504),
    (RetryError, 503),
    (ShoalError, 500),
)


_ALL_PATHS = "GET /openapi.json lists all paths."
_FIXES = {
    404: _ALL_PATHS,
    405: _ALL_PATHS,
    408: "Send the whole body within that time.",
    413: "Send a smaller body.",
}


class ErrorBody(BaseModel):
    """Answer to a request that failed."""

    model_config = ConfigDict(
        use_attribute_docstrings=True,
        json_schema_extra={
            "examples": [
                {
                    "kind": "UnknownMember",
                    "what": "job digits has no member w7",
                    "seen": "w7",
                    "expected": "one of w0, w1, w2",
                    "fix": "`shoal status --job digits` lists the members.",
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


def answer(
    error: ShoalError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """HTTP answer for an error."""
    if status is None:
        status = next(code for kind, code in _STATUSES if isinstance(error, kind))
    body = ErrorBody(
        kind=type(error).__name__,
        what=error.what,
        seen=error.seen,
        expected=error.expected,
        fix=error.fix,
    )
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def install(app: FastAPI, body_s: float) -> None:
    """Make the app answer every failure with an ErrorBody, and refuse bodies that are too large, or
    not complete after `body_s` seconds."""

    @app.exception_handler(ShoalError)
    async def refused(request: Request, error: ShoalError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(_from_validation(error.errors(), request.url.path))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:
            # FastAPI's status for a body that it cannot decode.
            return answer(_no_json(request.url.path, error.detail))
        if error.status_code == 404:
            what = f"there is nothing at {request.url.path}"
        else:
            what = f"{request.method} {request.url.path}: {error.detail}"
        fix = _FIXES.get(error.status_code, "")
        refusal = RefusedError(what, fix=fix)
        return answer(refusal, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        log.error("http_request_failed", path=request.url.path, exc_info=error)
        return answer(InternalError("the coordinator failed on this request", seen=repr(error)))

    app.add_middleware(BodyLimit, within_s=body_s)


def _from_validation(errors: Sequence[Any], path: str) -> MalformedMessage:
    """Combine pydantic's errors into one that names at most 8 fields."""
    wrong = [e for e in errors[:8] if e["type"] != "json_invalid"]
    if not wrong:
        reason = errors[0].get("ctx", {}).get("error", "")
        return _no_json(path, reason)
    if isinstance(wrong[0]["input"], bytes):
        # FastAPI parses only a body whose header says that it is JSON.
        return _no_json(path, "another content-type", "the header content-type: application/json")
    fields = [".".join(str(part) for part in e["loc"][1:]) or str(e["loc"][0]) for e in wrong]
    seen = [
        f"no {field}" if e["type"] == "missing" else f"{field} = {_brief(e['input'])}"
        for field, e in zip(fields, wrong, strict=True)
    ]
    return MalformedMessage(
        f"invalid fields in the request to {path}: {', '.join(fields)}",
        seen="; ".join(seen),
        expected="; ".join(f"{f}: {_rule(e)}" for f, e in zip(fields, wrong, strict=True)),
        fix="GET /openapi.json describes every field.",
    )


def _no_json(path: str, reason: str, expected: str = "a JSON object") -> MalformedMessage:
    return MalformedMessage(f"the body of {path} is not JSON", seen=reason, expected=expected)


def _rule(error: Mapping[str, Any]) -> str:
    # pydantic reports an unknown field of a dataclass as an unknown argument of a call.
    unknown = error["type"] == "unexpected_keyword_argument"
    return "no field of that name" if unknown else str(error["msg"])


def _brief(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


class BodyLimit:
    """Answers 413 as soon as a body exceeds MAX_BODY_BYTES, and 408 for a body that is not complete
    in time. If an answer has begun, the app sees a disconnect instead."""

    def __init__(self, app: ASGIApp, within_s: float) -> None:
        self._app = app
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen_bytes, is_whole, has_begun = 0, False, False
        due_s = asyncio.get_running_loop().time() + self._within_s

        async def limited() -> Message:
            nonlocal seen_bytes, is_whole
            if is_whole:
                # After the body comes only the client's disconnect.
                return await receive()
            try:
                async with asyncio.timeout_at(due_s):
                    message = await receive()
            except TimeoutError:
                return refused(408, f"the body did not arrive within {self._within_s:g} s")
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > MAX_BODY_BYTES:
                return refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            is_whole = not message.get("more_body", False)
            return message

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        def refused(status: int, what: str) -> Message:
            if not has_begun:
                raise HTTPException(status, what)
            return {"type": "http.disconnect"}

        await self._app(scope, limited, sending)
