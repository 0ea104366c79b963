"""Meaning of torchrun's options for a node that joins a Shoal job."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from torch.distributed.elastic.rendezvous import RendezvousParameters

from shoal.membership.join_config import JoinConfig
from shoal_client.connection.admission import ADMISSION_S
from shoal_proto.errors import InvalidSpec
from shoal_proto.secrets import member_secrets
from shoal_proto.tls import identity
from shoal_proto.tls.identity import from_environment

log = structlog.get_logger(__name__)

BACKEND = "shoal"
DEFAULT_PORT = 7700

_HONOURED = ("join_timeout", "last_call_timeout", "close_timeout", "connect_timeout")
_LIVENESS = "the coordinator's --heartbeat-s decides how soon a silent node is lost"
_HOST = "no node hosts the rendezvous: the coordinator does"
_WITHOUT_EFFECT: Mapping[str, str] = {
    "heartbeat_timeout": _LIVENESS,
    "keep_alive_interval": _LIVENESS,
    "keep_alive_max_attempt": _LIVENESS,
    "is_host": _HOST,
    "store_type": _HOST,
    "use_libuv": _HOST,
    "read_timeout": "connect_timeout takes its place",
}
_SET_BY_TORCHRUN = "timeout"


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Options of one torchrun agent as a member of a job."""

    join: JoinConfig
    join_timeout_s: float = 600.0
    """Longest time of one rendezvous; a standby node waits longer, while a coordinator answers."""
    last_call_timeout_s: float = 0.0
    """Time that the first generation waits for more nodes once it has enough.

    0: the coordinator decides.
    """
    close_timeout_s: float = 30.0
    """Time for which the node tries to tell the coordinator that it leaves."""
    connect_timeout_s: float = ADMISSION_S
    """Time within which a coordinator has to answer when the node starts."""

    @classmethod
    def read(cls, parameters: RendezvousParameters) -> "NodeConfig":
        """Read and check torchrun's options. Raises InvalidSpec, which names the bad option."""
        coordinators = _endpoints(parameters.endpoint)
        if (files := from_environment(addresses=coordinators)) is not None:
            identity.use(files)
        join = JoinConfig(
            job=_run_id(parameters.run_id),
            coordinators=coordinators,
            min_members=parameters.min_nodes,
            max_members=parameters.max_nodes,
            desired_members=parameters.max_nodes,
            address=parameters.local_addr or "",
            secrets=member_secrets(os.environ),
        )
        return cls(join=join, **_seconds(parameters.config))


def _run_id(run_id: str) -> str:
    # Without --rdzv-id torchrun passes "none".
    if run_id in ("", "none"):
        raise InvalidSpec(
            "the job has no name",
            seen=f"--rdzv-id={run_id}",
            expected="a different name for every job",
            fix="Pass --rdzv-id=NAME to every node: the same name, and not a finished job's.",
        )
    return run_id


def _endpoints(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InvalidSpec(
            "no coordinator was named",
            seen=f"--rdzv-endpoint={text}",
            expected="HOST:PORT of one or more coordinators",
            fix="Pass --rdzv-endpoint=HOST:PORT[,HOST:PORT]; `shoal up` starts a cluster here.",
        )
    return tuple(part if _has_port(part) else f"{part}:{DEFAULT_PORT}" for part in parts)


def _has_port(address: str) -> bool:
    return ":" in address.rpartition("]")[2]


def _seconds(given: Mapping[str, object]) -> dict[str, float]:
    """Return the options of --rdzv-conf that have an effect."""
    known = {*_HONOURED, *_WITHOUT_EFFECT, _SET_BY_TORCHRUN}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidSpec(
            f"--rdzv-conf has options that {BACKEND} does not know",
            seen=", ".join(unknown),
            expected=f"some of {', '.join(_HONOURED)}",
        )
    for name in sorted(set(given) & set(_WITHOUT_EFFECT)):
        log.warning("option_without_effect", option=name, reason=_WITHOUT_EFFECT[name])
    return {f"{name}_s": _positive(name, given[name]) for name in _HONOURED if name in given}


def _positive(name: str, value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidSpec(
            f"--rdzv-conf {name} is not a time", seen=repr(value), expected="seconds above 0"
        )
    return seconds
