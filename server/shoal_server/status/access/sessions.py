"""Sessions of the page: after a login with a token, a cookie replaces it for twelve hours."""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal_server.status.access.tokens import TokenHolder, Tokens

VALID_S = 12 * 3600
MAX_SESSIONS = 1024
COOKIE = "shoal_session"
"""Name of the cookie, before the port: browsers send the cookies of all ports of a host."""


@dataclass(frozen=True)
class _Session:
    digest: str
    valid_until_s: float


class Sessions:
    """Sessions in memory: they end with the process."""

    def __init__(self, tokens: Tokens, now_s: Callable[[], float] = time.monotonic) -> None:
        self._tokens = tokens
        self._now_s = now_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def begin(self, holder: TokenHolder) -> str:
        """Begin a session; return its secret, for a cookie."""
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        secret = secrets.token_urlsafe(32)
        valid_until_s = self._now_s() + VALID_S
        self._sessions[_key(secret)] = _Session(holder.digest, valid_until_s)
        return secret

    def holder(self, secret: str) -> TokenHolder | None:
        """Holder of a session; None if it is over, or its token was removed. Raises what
        `Tokens.holder` raises."""
        session = self._sessions.get(_key(secret))
        if session is None or self._now_s() >= session.valid_until_s:
            return None
        return self._tokens.of_digest(session.digest)

    def end(self, secret: str) -> None:
        self._sessions.pop(_key(secret), None)


def _key(secret: str) -> str:
    # Looked up by a hash, so that the time reveals nothing of the secret.
    return hashlib.sha256(secret.encode()).hexdigest()


def cookie_name(host: str) -> str:
    """Name of the session's cookie. `host`: the request's header of this name."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def cookie(secret: str, host: str, *, is_https: bool) -> str:
    """Set-Cookie header for a session; an empty secret deletes the cookie."""
    age_s = VALID_S if secret else 0
    parts = [
        f"{cookie_name(host)}={secret}",
        "Path=/",
        "HttpOnly",
        "SameSite=Strict",
        f"Max-Age={age_s}",
    ]
    return "; ".join([*parts, "Secure"] if is_https else parts)
