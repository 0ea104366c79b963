"""Commands on other hosts with the system's ssh."""

import ipaddress
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec

LOCALHOST = "localhost"
"""This machine among hosts, used without ssh."""
CONNECTION = "SSH_CONNECTION"
MARK = "shoal-host: "
"""Start of messages to the connecting command; other lines are output."""
# A name that begins with "-" would be an option of ssh.
HOST_NAME = r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])"
"""HOST or USER@HOST, with brackets around an IPv6 address."""
SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes"),
    # Override ~/.ssh/config: over a shared connection, ServerAliveInterval would have no effect.
    *("-o", "RemoteCommand=none", "-o", "ControlPath=none"),
    # A host that is cut off counts as lost after half a minute.
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"),
)
ADVICE = (
    "Try `ssh -o BatchMode=yes -o ControlPath=none HOST true`: ssh must not ask for a password or"
    " for the host's key."
)


def command_on(host: str, words: Sequence[str]) -> Sequence[str]:
    """Return the command that runs `words` on the host."""
    line = f"exec {shlex.join(words)}"
    if host == LOCALHOST:
        # That of the user's own login says nothing about this machine and the hosts.
        return ("sh", "-c", f"unset {CONNECTION}; {line}")
    return ("ssh", *SSH_OPTIONS, "--", host, line)


def connection_addresses() -> tuple[str, str]:
    """Return the addresses of the connecting machine and of this one, on a host that ssh has
    connected to; empty strings if ssh does not know them, as behind a ProxyCommand."""
    client, _, own, *_ = [*os.environ.get(CONNECTION, "").split(), "", "", ""]
    return ("", "") if "UNKNOWN" in (client, own) else (client, own)


def check_ssh(hosts: Sequence[str]) -> None:
    """Raise InvalidSpec if ssh is needed for a host and not installed."""
    if any(host != LOCALHOST for host in hosts) and shutil.which("ssh") is None:
        raise InvalidSpec(
            "no ssh on this machine",
            seen="no `ssh` on PATH",
            expected="OpenSSH's client",
            fix="Debian: apt-get install openssh-client",
        )


def bare_name(name: str) -> str | None:
    """Return a name that matches HOST_NAME without its brackets; None if they contain no IPv6
    address."""
    if name.endswith("]"):
        try:
            ipaddress.IPv6Address(name[name.index("[") + 1 : -1])
        except ValueError:
            return None
    return name.replace("[", "").replace("]", "")


def check_once(names: Sequence[str], expected: str) -> None:
    """Raise InvalidSpec if a host is given twice."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidSpec("a host is given twice", seen=", ".join(twice), expected=expected)


def parse_host_names(text: str) -> tuple[str, ...]:
    """Return the hosts in `HOST,...`. Raises InvalidSpec for a bad or repeated host."""
    names = []
    for part in (each.strip() for each in text.split(",") if each.strip()):
        name = bare_name(part) if re.fullmatch(HOST_NAME, part) else None
        if name is None:
            raise InvalidSpec(
                "bad host",
                seen=repr(part),
                expected="HOST, USER@HOST or [IPv6 ADDRESS], with names of letters, digits, '.',"
                " '_' and '-' that do not start with '-'",
            )
        names.append(name)
    check_once(names, "each host once")
    return tuple(names)


def _parsed(kind: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    return parse_host_names(str(tokens[-1].value))


HostNames = Annotated[
    Sequence[str],
    Parameter(
        name="--hosts",
        metavar="HOST,...",
        converter=_parsed,
        n_tokens=1,
        json_list=False,
        json_dict=False,
    ),
]
