"""Route to the primary of a shard, sent with the refusal of a call that reached another server.

In the details of a WrongEpoch, one entry a shard: `details["shard 3"] == "6 ps-2 10.0.0.2:7710"`,
its epoch, the id of its primary's server, and host:port of that.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal_proto.errors import ShoalError, WrongEpoch

_PREFIX = "shard "


@dataclass(frozen=True, slots=True)
class Route:
    """Server that leads a shard, or is about to, and the epoch."""

    shard_id: int
    epoch: int
    server_id: str
    address: str


def as_details(routes: Iterable[Route]) -> dict[str, str]:
    """The routes as details of an error."""
    return {f"{_PREFIX}{r.shard_id}": f"{r.epoch} {r.server_id} {r.address}" for r in routes}


def of(error: WrongEpoch) -> list[Route]:
    """The routes that an error tells; what does not read as one is passed over."""
    routes = []
    for key, value in error.details.items():
        shard_id, words = key.removeprefix(_PREFIX), value.split(" ")
        if key.startswith(_PREFIX) and shard_id.isdecimal() and len(words) == 3:
            epoch, server_id, address = words
            if epoch.isdecimal() and address:
                routes.append(Route(int(shard_id), int(epoch), server_id, address))
    return routes


def gather(worst: ShoalError, errors: Iterable[ShoalError]) -> ShoalError:
    """The worst of some errors; if that is a WrongEpoch, with the routes of all the others."""
    if isinstance(worst, WrongEpoch):
        for error in errors:
            if isinstance(error, WrongEpoch):
                worst.details.update(error.details)
    return worst
