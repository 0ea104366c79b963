"""Checks of members' devices and addresses."""

from collections.abc import Sequence
from ipaddress import ip_address

from shoal_server.core.generations.roster import Candidate, MemberInfo

MAX_DEVICES = 1024


def device_problem(info: MemberInfo) -> str:
    """Return the fault in a member's devices; empty without one."""
    if info.device.startswith("cuda") and info.num_devices < 1:
        return f"device {info.device!r} with {info.num_devices} devices"
    if info.num_devices > MAX_DEVICES:
        return f"{info.num_devices} devices"
    return ""


def unreachable_members(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose address other hosts cannot reach; none if all are on one host."""
    if len({c.info.host for c in candidates}) < 2:
        return []
    return [c for c in candidates if _is_confined(c.info.address)]


def _is_confined(address: str) -> bool:
    if not address or address == "localhost":
        return True
    try:
        parsed = ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return False  # only peers can tell if they resolve a host name
    return parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast
