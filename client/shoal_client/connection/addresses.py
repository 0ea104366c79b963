"""Addresses of coordinators, as a user writes them."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from shoal_proto.addresses import is_reachable_address
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import local_clusters
from shoal_proto.tls.local_clusters import LocalClusterRecord

USUAL_COORDINATOR = "127.0.0.1:7700"


def parse_coordinators(text: str) -> tuple[str, ...]:
    """The addresses in `host:port[,host:port...]`. Raises InvalidSpec."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        if not is_reachable_address(address):
            raise InvalidSpec(
                "bad coordinator address", seen=repr(address), expected="HOST:PORT[,HOST:PORT...]"
            )
    if not addresses:
        raise InvalidSpec("no coordinator address", seen=repr(text), expected="HOST:PORT")
    return addresses


def _parsed(kind: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    return parse_coordinators(tokens[-1].value)


CoordinatorAddresses = Annotated[
    Sequence[str],
    Parameter(
        name="--coordinator",
        env_var="SHOAL_COORDINATOR",
        metavar="HOST:PORT,...",
        converter=_parsed,
        n_tokens=1,
        help="Addresses of the coordinators.",
    ),
]
UsualCoordinators = Annotated[
    CoordinatorAddresses,
    Parameter(
        help=f"Addresses of the coordinators. By default {USUAL_COORDINATOR}, or your only cluster"
        " on this machine."
    ),
]
"""Empty if not given: `usual_coordinators` then returns the addresses."""


def usual_coordinators() -> tuple[str, ...]:
    """Return the coordinators of this user's only cluster; the usual address if a cluster has it,
    or none runs. Raises InvalidSpec for several clusters."""
    found = only_cluster(USUAL_COORDINATOR, "--coordinator HOST:PORT or $SHOAL_COORDINATOR")
    if found is None:
        return (USUAL_COORDINATOR,)
    return tuple(each for each in found.addresses if each not in found.pages)


def only_cluster(usual: str, option: str) -> LocalClusterRecord | None:
    """Return this user's only cluster; None if there is none, or one has the usual address. Raises
    InvalidSpec, which names `option`, for several clusters."""
    running = [each for each in local_clusters.running() if each.pages]
    if not running or any(usual in each.addresses for each in running):
        return None
    if len(running) > 1:
        raise InvalidSpec(
            "you have several clusters on this machine",
            seen=" and ".join(",".join(each.addresses) for each in running),
            expected="the address of one",
            fix=f"Give it with {option}.",
        )
    return running[0]
