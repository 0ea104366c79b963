"""Addresses of coordinators, as a user writes them."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from shoal_proto.addresses import is_reachable_address
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import local_clusters
from shoal_proto.tls.local_clusters import LocalClusterRecord

USUAL_COORDINATOR = "127.0.0.1:7700"
USUAL_PAGE = "127.0.0.1:7780"


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
        help="Addresses of the coordinators. By default those of your cluster on this machine: the"
        f" only one, or the one at a usual port; without a cluster {USUAL_COORDINATOR}."
    ),
]
"""Empty if not given: `usual_coordinators` then returns the addresses."""


def usual_coordinators() -> tuple[str, ...]:
    """Return the coordinators of `usual_cluster`; USUAL_COORDINATOR without one. Raises
    InvalidSpec."""
    found = usual_cluster("--coordinator HOST:PORT or $SHOAL_COORDINATOR")
    if found is None:
        return (USUAL_COORDINATOR,)
    return tuple(each for each in found.addresses if each not in found.pages)


def usual_cluster(option: str) -> LocalClusterRecord | None:
    """Return this user's cluster with a usual address, else the only one; None if none runs. Raises
    InvalidSpec, which names `option`, if several clusters come into question."""
    running = [each for each in local_clusters.running() if each.pages]
    # Commands that need a coordinator and commands that need a page must choose the same cluster:
    # one shows what another has changed.
    usual = [each for each in running if {USUAL_COORDINATOR, USUAL_PAGE} & {*each.addresses}]
    found = usual or running
    if len(found) > 1:
        raise InvalidSpec(
            "you have several clusters on this machine",
            seen=" and ".join(",".join(each.addresses) for each in found),
            expected="the address of one",
            fix=f"Give it with {option}.",
        )
    return found[0] if found else None
