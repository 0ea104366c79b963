"""Check of the Host header: a page of another site must not read this API through a user's browser.

An attacker's name may resolve to 127.0.0.1 (DNS rebinding), but the browser still sends that name
in Host. So no outsider may control what an allowed host resolves to; an operator allows others with
--http-host.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from shoal_proto.errors import AccessDenied
from shoal_server.status.http.errors import answer

PRIVATE_SUFFIXES = (".localhost", ".svc", ".svc.cluster.local", ".internal")
"""Suffixes that are reserved, or resolved inside one cluster only."""
ANY = "*"


@dataclass(frozen=True)
class AllowedHosts:
    """Hosts by which this server may be reached. `named`: those that an operator allows, and the
    advertised host; `*` allows any."""

    named: Sequence[str] = ()

    def allows(self, host: str) -> bool:
        """True if a Host header (with or without a port) is allowed."""
        name = _without_port(host).lower().rstrip(".")
        if not name:
            return False
        return ANY in self.named or _is_private(name) or name in map(str.lower, self.named)


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        return address if not rest or rest.startswith(":") else host
    return host.partition(":")[0]


def _is_private(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return "." not in name or name.endswith(PRIVATE_SUFFIXES) or name == own
    return True


class HostCheck:
    """Answers 421 if the Host header names another site."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for key, value in scope["headers"] if key == b"host"]
            host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
            if not self._allowed.allows(host):
                refusal = AccessDenied(
                    "this server is not that host",
                    seen=repr(host)[:200],
                    expected="an address, a name without a dot, or a name given with --http-host",
                    fix="Start the coordinator with --http-host NAME to be reached by that name.",
                )
                await answer(refusal, 421)(scope, receive, send)
                return
        await self._app(scope, receive, send)
