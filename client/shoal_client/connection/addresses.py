"""The addresses of coordinators, as a user writes them."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec

DEFAULT_COORDINATORS = ("127.0.0.1:7700",)


def parse_coordinators(text: str) -> tuple[str, ...]:
    """The addresses in `host:port[,host:port...]`. Raises InvalidSpec."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
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
"""The option --coordinator."""
