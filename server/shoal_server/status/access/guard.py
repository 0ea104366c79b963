"""Guard of HTTP requests: identifies the caller, checks its role, and logs operations."""

import os
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from shoal_proto.errors import AccessDenied, InvalidSpec
from shoal_proto.tls import identity
from shoal_proto.traces.log_limit import LogLimit
from shoal_server.serving.access.local_users import PEER_USER
from shoal_server.serving.access.roles import READS_STATUS
from shoal_server.status.access.sessions import Sessions, cookie_name
from shoal_server.status.access.tokens import HttpRole, TokenHolder, Tokens
from shoal_server.status.http.errors import answer
from shoal_server.status.http.protocol import caller_in

log = structlog.get_logger(__name__)

HOLDER = "shoal_holder"
OPEN = frozenset(
    {
        "/",
        "/page.js",
        "/actions.js",
        "/output.js",
        "/outputs.js",
        "/charts.js",
        "/plot.js",
        "/export.js",
        "/vendor/uPlot.iife.min.js",
        "/vendor/uPlot.min.css",
        "/login.js",
        "/page.css",
        "/healthz",
        "/readyz",
        "/openapi.json",
        "/api/v1/session",
    }
)
"""Paths that reveal nothing about jobs: the page's own files, and probes."""
REPORT = re.compile("/api/v1/jobs/[^/]+/members/[^/]+/health")
"""Path of health reports, which have the secret of the worker's process."""
READING = ("GET", "HEAD", "OPTIONS")
_JOB = re.compile("/api/v1/jobs/([^/]+)")
NOBODY = TokenHolder(name="", role=HttpRole.OPERATOR, digest="")
OWN_USER = TokenHolder(name="this machine's user", role=HttpRole.OPERATOR, digest="")
"""Holder of requests from this user or root, if users are checked."""


class Guard:
    """Finds the holder of a request.

    With `own_user`, processes of this process's user and of root may do everything; others need one
    of `tokens`. Without both, every caller may do everything; over TLS `AccessControl` then checks
    the role of the caller's certificate.
    """

    def __init__(self, tokens: Tokens | None = None, *, own_user: bool = False) -> None:
        self.tokens = tokens
        self.sessions = None if tokens is None else Sessions(tokens)
        self._users = frozenset({os.geteuid(), 0}) if own_user else frozenset()

    @property
    def is_open(self) -> bool:
        """True if every caller that reaches the port is admitted."""
        return self.tokens is None and not self._users

    def holder(self, scope: Scope) -> TokenHolder | None:
        """Holder of the request's credentials; None if unknown. Raises InvalidSpec if the tokens
        cannot be read."""
        if self.is_open:
            return NOBODY
        if scope.get("state", {}).get(PEER_USER) in self._users:
            return OWN_USER
        if self.tokens is None or self.sessions is None:
            return None
        kind, _, token = header(scope, b"authorization").partition(" ")
        if kind:
            return self.tokens.holder(token.strip()) if kind.lower() == "bearer" else None
        secret = session_of(scope)
        return self.sessions.holder(secret) if secret else None

    def is_known(self, scope: Scope) -> bool:
        """True if the request's credentials are still accepted. An open stream has to end once they
        are not."""
        try:
            return self.holder(scope) is not None
        except InvalidSpec:
            return False


def header(scope: Scope, name: bytes) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == name), "")


def session_of(scope: Scope) -> str:
    """Secret in the session's cookie; empty without one."""
    try:
        cookies = SimpleCookie(header(scope, b"cookie"))
    except CookieError:
        return ""
    name = cookie_name(header(scope, b"host"))
    return cookies[name].value if name in cookies else ""


def may_read(scope: Scope) -> bool:
    """True if the caller may read the status of the job in the path."""
    holder = scope.get(HOLDER)
    if holder is NOBODY:
        return identity.own() is None or _uncertified(scope) is None
    return holder is not None


class AccessControl:
    """Answers 401 to unknown callers, 403 to actions of other sites' pages and of roles that may
    not act or read, and 503 to credentials while the tokens cannot be read."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard
        # Whoever reaches the port could fill the disk, and push operators' lines out of the log.
        self._of_strangers = LogLimit(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        acts = scope["method"] not in READING and not REPORT.fullmatch(scope["path"])
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        holder: TokenHolder | None = None
        try:
            holder = self._guard.holder(scope)
            refusal = self._refusal(scope, holder, acts=acts)
        except InvalidSpec as error:
            log.error("http_tokens_not_read", reason=str(error))
            refusal = AccessDenied("no token is accepted", seen="tokens that cannot be read"), 503
        if refusal is None:
            scope[HOLDER] = holder
            await self._app(scope, receive, sending)
        else:
            why, code = refusal
            headers = {"WWW-Authenticate": 'Bearer realm="shoal"'} if code == 401 else None
            await answer(why, code, headers)(scope, receive, sending)
        if acts:
            is_stranger = holder is None and status >= 400
            _audit(scope, holder, status, self._of_strangers if is_stranger else log)

    def _refusal(
        self, scope: Scope, holder: TokenHolder | None, *, acts: bool
    ) -> tuple[AccessDenied, int] | None:
        path, method = scope["path"], scope["method"]
        # A page of another site could act through a user's browser, which names the site in Origin.
        origin = header(scope, b"origin")
        if acts and origin and _netloc(origin) != header(scope, b"host"):
            expected = "a page of this server, or no browser"
            return AccessDenied("that site may not act", seen=origin, expected=expected), 403
        if path in OPEN or REPORT.fullmatch(path):
            return None
        if holder is NOBODY:
            why = None if identity.own() is None else _uncertified(scope)
            return None if why is None else (why, 403)
        if holder is None:
            return _unknown(path, takes_tokens=self._guard.tokens is not None), 401
        if acts and not holder.role.may_act():
            seen = f"the token of {holder.name}, a {holder.role.value}"
            return AccessDenied(f"{method} {path} is for operators", seen=seen), 403
        return None


def _uncertified(scope: Scope) -> AccessDenied | None:
    """Refusal of a request that the caller's certificate does not permit; else None."""
    caller, path = caller_in(scope), scope["path"]
    if caller is None or caller.role not in READS_STATUS:
        return AccessDenied(
            f"{path} is not for this caller",
            seen="a certificate that names no role"
            if caller is None
            else f"the certificate of {caller}",
            expected=f"the role {' or '.join(sorted(role.value for role in READS_STATUS))}",
            fix="Issue a certificate for it: shoal certs issue viewer.",
        )
    job = _JOB.match(path)
    if caller.job and (job is None or job[1] != caller.job):
        return AccessDenied(
            f"the certificate is for {'one' if job is None else 'another'} job",
            seen=f"{path}, by {caller}",
            expected=f"/api/v1/jobs/{caller.job}",
        )
    return None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _unknown(path: str, *, takes_tokens: bool) -> AccessDenied:
    if not takes_tokens:
        return AccessDenied(
            f"{path} is for the user that runs this cluster",
            seen="a connection of another user, or of an unknown one",
            expected="a connection made on this machine, as that user or as root",
            fix="For others: start the cluster with --http-tokens FILE; `shoal token create` makes"
            " the file.",
        )
    return AccessDenied(
        f"{path} is for holders of a token",
        seen="no token, or an unknown one",
        expected="the header Authorization: Bearer TOKEN, or a session of the page",
        fix="An operator makes one: shoal token create --role viewer --name NAME",
    )


def _audit(
    scope: Scope,
    holder: TokenHolder | None,
    status: int,
    to: LogLimit | FilteringBoundLogger,
) -> None:
    job = _JOB.match(scope["path"])
    client = scope.get("client")
    to.info(
        "operator_call",
        call=f"{scope['method']} {scope['path']}"[:500],
        job=job[1][:128] if job else "",
        by="" if holder is None else holder.name,
        role="" if holder is None or holder is NOBODY else holder.role.value,
        peer=str(client[0]) if client else "",
        outcome=status,
    )
