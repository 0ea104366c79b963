"""Route to the primary of a shard, in the refusal of a call that reached another server.

`details["shard 3"] == "6 ps-2 10.0.0.2:7710"` has the shard's epoch, the id of the primary's
server, and its host:port.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal_proto.errors import ShoalError, WrongEpoch

_PREFIX = "shard "


@dataclass(frozen=True, slots=True)
class Route:
    """The server of a shard's primary, or of the successor during a handover."""

    shard_id: int
    epoch: int
    server_id: str
    address: str


def as_details(routes: Iterable[Route]) -> dict[str, str]:
    """Return the routes as an error's details."""
    return {f"{_PREFIX}{r.shard_id}": f"{r.epoch} {r.server_id} {r.address}" for r in routes}


def from_error(error: WrongEpoch) -> list[Route]:
    """Return the routes in an error's details."""
    routes = []
    for key, value in error.details.items():
        shard_id, words = key.removeprefix(_PREFIX), value.split(" ")
        if key.startswith(_PREFIX) and shard_id.isdecimal() and len(words) == 3:
            epoch, server_id, address = words
            if epoch.isdecimal() and address:
                routes.append(Route(int(shard_id), int(epoch), server_id, address))
    return routes


def gather(worst: ShoalError, errors: Iterable[ShoalError]) -> ShoalError:
    """Return `worst`; a WrongEpoch gets the routes of the other errors."""
    if isinstance(worst, WrongEpoch):
        for error in errors:
            if isinstance(error, WrongEpoch):
                worst.details.update(error.details)
    return worst
