"""Versions of the protocol that a process speaks, and the choice of one.

A new version means that a message or call has changed its meaning. A new field needs no new
version: a process ignores a field that it does not know, or passes it on. A release also speaks the
versions of the release before it.

Each process sends its range with every call, in gRPC's user agent. If the server shares no version
with that range, it refuses the call before it reads the request. A call without a range, as of
another program, is served.
"""

import re
from dataclasses import dataclass

from shoal_proto.errors import ProtocolMismatch

_ANNOUNCED = re.compile(r"shoal-protocol/(\d{1,9})-(\d{1,9})(?:\s|$)")


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest}-{self.newest}"

    def shared_with(self, other: "ProtocolRange") -> int | None:
        """Return the newest version that both speak, if any."""
        shared = min(self.newest, other.newest)
        return shared if shared >= max(self.oldest, other.oldest) else None

    def negotiate(self, caller: "ProtocolRange") -> int:
        """Return the version to speak with a caller. Raises ProtocolMismatch."""
        shared = self.shared_with(caller)
        if shared is None:
            older = "caller" if caller.newest < self.oldest else "server"
            raise ProtocolMismatch(
                "caller and server have no version of the protocol in common",
                seen=f"versions {caller}",
                expected=f"one of the versions {self}",
                fix=f"Upgrade the {older}: neighbouring minor versions of shoal understand each"
                " other, others do not.",
            )
        return shared


OWN_PROTOCOLS = ProtocolRange(oldest=3, newest=3)


def user_agent(spoken: ProtocolRange) -> str:
    """Return the user agent that announces these versions."""
    return f"shoal-protocol/{spoken}"


USER_AGENT_OPTION = ("grpc.primary_user_agent", user_agent(OWN_PROTOCOLS))
"""Option of every channel between processes of Shoal."""


def announced(agent: str) -> ProtocolRange | None:
    """Return the range in a call's user agent; None if it has none, as that of another program."""
    found = _ANNOUNCED.search(agent)
    return ProtocolRange(int(found[1]), int(found[2])) if found else None
