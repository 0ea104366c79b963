"""`shoal down`: ends a control plane that `shoal up --hosts` has started."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_client.remote.control_plane import (
    ControlPlaneHosts,
    check_machine,
    recorded,
    stop,
)
from shoal_client.remote.ssh import HostNames, check_ssh
from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class DownConfig:
    """Ends all parts of the control plane that `shoal up --hosts` has started, and removes etcd's
    data and the private keys on its hosts: what the cluster knows of its jobs is gone. Logs and
    checkpoints stay."""

    hosts: HostNames = ()
    """Hosts on which to end parts. By default all hosts of the control plane that was started from
    this machine."""
    directory: Annotated[Path | None, Parameter(name="--dir", metavar="DIRECTORY")] = None
    """The --dir with which the control plane was started."""
    python: Annotated[str, Parameter(name="--host-python", metavar="PATH")] = ""
    """Python with Shoal on the hosts. By default the one used at the start of the control plane."""


def down(config: DownConfig) -> int:
    """End the parts; return 1 if a host was not reached."""
    directory = "" if config.directory is None else str(config.directory.absolute())
    known = recorded(directory, damaged_counts=not config.hosts)
    if known is None and not config.hosts:
        raise InvalidSpec(
            "no control plane was started from this machine",
            seen=f"no record in {ControlPlaneHosts(names=(), directory=directory).here}",
            expected="the record of `shoal up --hosts`",
            fix="Give the hosts: shoal down --hosts HOST,... A cluster of `shoal up` without"
            " --hosts ends with Ctrl-C.",
        )
    if known is not None and not config.hosts:
        check_machine(known)
    hosts = known or ControlPlaneHosts(names=(), directory=directory)
    hosts = replace(hosts, names=config.hosts or hosts.names, python=config.python or hosts.python)
    check_ssh(hosts.names)
    failed = stop(hosts, lambda text: print(text, flush=True))
    return 1 if failed else 0
