"""`shoal kill`: kills a member's process on this host, as a crash would."""

import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_client.commands.address import StatusAddress
from shoal_client.commands.status import Json, StatusClient
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_name


@dataclass(frozen=True, kw_only=True)
class KillConfig:
    """Kills a member's process on this host (SIGKILL), without notice, as a crash or the loss of a
    machine would. The other members go on, and `shoal run` starts the process again. To let a
    member leave gracefully, use `shoal drain`."""

    member: str = field(kw_only=False)
    """Id of the member."""
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """The member's job. Needed only if several jobs have a member of this name."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        check_name(self.member, "member")
        if self.job:
            check_name(self.job, "job")


def kill(config: KillConfig) -> int:
    """Kill the process. Raises UnknownMember, or InvalidSpec if this user has no such process on
    this host."""
    with StatusClient(config.address.urls()) as client:
        job = config.job or client.job_of(config.member)
        process = client.member(job, config.member)["member"]["process"]
    pid = int(process["pid"])
    # Unlike a pid, a descriptor cannot name another process by the time of the signal.
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        raise _not_here(config.member, process) from None
    try:
        if not _is_worker(pid, config.member):
            raise _not_here(config.member, process)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        raise _not_here(config.member, process) from None
    finally:
        os.close(descriptor)
    print(f"killed {config.member}, pid {pid}; `shoal events {job}` shows what follows")
    return 0


def _is_worker(pid: int, member_id: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"SHOAL_MEMBER_ID={member_id}".encode() in variables


def _not_here(member_id: str, process: Json) -> InvalidSpec:
    return InvalidSpec(
        f"{member_id} has no process of yours on this host",
        seen=f"pid {process['pid']} on {process['host']}; this host is {socket.gethostname()}",
        expected="a worker of `shoal run`, on its host, by its user",
        fix="Run the command there; `shoal drain` works from anywhere.",
    )
