"""Options of a command that starts a cluster on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from shoal_proto.errors import InvalidSpec

_LIMIT = Parameter(
    metavar="SECONDS",
    group=Group(
        "Time limits of the cluster that is started",
        help="By default the limits of `shoal coordinator`, which `shoal config` shows.",
    ),
)
DEFAULT_NUM_SERVERS = 2
LIMITS = ("heartbeat_s", "join_s", "collective_s", "wait_for_members_s")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    num_servers_given: Annotated[int | None, Parameter(name="--ps", metavar="N")] = None
    """Number of parameter servers in the cluster that is started. By default 2."""
    insecure: bool = False
    """Start the cluster without TLS: every user of this machine can then read its parameters and
    end its jobs. By default certificates are made for it, and your other commands find them."""
    heartbeat_s: Annotated[float | None, _LIMIT] = None
    """Time between heartbeats."""
    join_s: Annotated[float | None, _LIMIT] = None
    """Maximum time that a newcomer waits for a generation."""
    collective_s: Annotated[float | None, _LIMIT] = None
    """Maximum wait in a collective before it counts as hung."""
    wait_for_members_s: Annotated[float | None, _LIMIT] = None
    """Maximum time that a job that has trained waits for members while it has fewer than --min. By
    default there is no limit."""

    def __post_init__(self) -> None:
        if self.num_parameter_servers < 0:
            raise InvalidSpec(
                "bad --ps", seen=str(self.num_parameter_servers), expected="0 or more"
            )

    @property
    def num_parameter_servers(self) -> int:
        return DEFAULT_NUM_SERVERS if self.num_servers_given is None else self.num_servers_given

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits that were set, by option."""
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in LIMITS}
        return {option: value for option, value in values.items() if value is not None}
