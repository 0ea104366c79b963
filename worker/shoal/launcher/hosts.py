"""Hosts of `shoal run --hosts`, and the number of workers of each."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal_client.remote.ssh import HOST_NAME, LOCALHOST, bare_name, check_once
from shoal_proto.errors import InvalidSpec

MAX_HOSTS = 1000
MAX_WORKERS = 1024
_GPUS = Path("/proc/driver/nvidia/gpus")
_HOST = re.compile(rf"(?P<name>{HOST_NAME})(:(?P<num_workers>[A-Za-z0-9]+))?")
_GROUP = Group(
    "Several hosts, over ssh",
    help="Hosts have the script, the current directory and Shoal at the same paths as this machine,"
    " and accept your ssh key without a password.",
)


class WorkerCount(int):
    """Number of workers on this host, and the text that gave it, such as `auto`."""

    text: str


def num_workers_of(text: str, option: str = "-n") -> WorkerCount:
    """Return the number of workers for a value of -n: a number; `gpu` for the number of GPUs, which
    may be 0; `cpu` for the number of cores; `auto` for GPUs, or cores without a GPU. Raises
    InvalidSpec for other texts, but not for numbers below 1."""
    cores = len(os.sched_getaffinity(0))
    match text:
        case "auto":
            number = _num_gpus() or cores
        case "gpu":
            number = _num_gpus()
        case "cpu":
            number = cores
        case _:
            try:
                number = int(text)
            except ValueError:
                raise InvalidSpec(
                    f"bad {option}", seen=repr(text), expected="a number, auto, gpu or cpu"
                ) from None
    count = WorkerCount(number)
    count.text = text
    return count


_DEVICE = re.compile(r"\d+$|GPU-|MIG-")
"""Entry of CUDA_VISIBLE_DEVICES that names a device."""


def _num_gpus() -> int:
    """Count this process' GPUs, without torch, which takes seconds to import."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        # CUDA ignores everything from the first entry on that names no device.
        return len(list(takewhile(_DEVICE.match, map(str.strip, shown.split(",")))))
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


@dataclass(frozen=True)
class RunHost:
    """Host that runs workers."""

    name: str
    """HOST or USER@HOST, as for ssh."""
    num_workers: str = ""
    """Number of workers, auto, gpu or cpu; empty: the value of -n."""

    def __post_init__(self) -> None:
        # Only the host knows its number of GPUs.
        count = num_workers_of(self.num_workers or "1", f"number of workers of {self.name}")
        if count < 1 and count.text != "gpu":
            raise InvalidSpec("no workers", seen=f"{self.name}:{count}", expected="at least 1")
        if count > MAX_WORKERS:
            raise InvalidSpec(
                "too many workers for a host",
                seen=f"{self.name}:{count}",
                expected=f"HOST:N, with N up to {MAX_WORKERS}",
                fix="If that is the port of its sshd, set it in ~/.ssh/config (Port).",
            )


def parse_hosts(text: str) -> tuple[RunHost, ...]:
    """Return the hosts in `HOST[:N],...`. Raises InvalidSpec for a bad host, a host that is given
    twice, and for no or more than MAX_HOSTS hosts."""
    hosts = tuple(_host_of(part.strip()) for part in text.split(",") if part.strip())
    check_once([host.name for host in hosts], "each host once, with its number of workers: HOST:N")
    if not 0 < len(hosts) <= MAX_HOSTS:
        raise InvalidSpec(
            "bad --hosts", seen=f"{len(hosts)} hosts", expected=f"1 to {MAX_HOSTS} hosts"
        )
    return hosts


def _host_of(text: str) -> RunHost:
    match = _HOST.fullmatch(text)
    name = None if match is None else bare_name(match["name"])
    if match is None or name is None:
        raise InvalidSpec(
            "bad host",
            seen=repr(text),
            expected="HOST, HOST:N, USER@HOST:N or [IPv6 ADDRESS]:N, with names of letters, digits,"
            " '.', '_' and '-' that do not start with '-'",
        )
    return RunHost(name, match["num_workers"] or "")


def check_reached(hosts: Sequence[RunHost], coordinators: Sequence[str]) -> None:
    """Raise InvalidSpec if a coordinator has a loopback address and a host is another machine."""
    # 127.0.1.1: this machine's own name, in Debian's /etc/hosts.
    loopback = ("127.0.0.1:", "127.0.1.1:", "localhost:", "[::1]:")
    unreachable = [each for each in coordinators if each.lower().startswith(loopback)]
    if unreachable and any(host.name != LOCALHOST for host in hosts):
        raise InvalidSpec(
            "the hosts cannot reach the coordinator",
            seen=f"{','.join(unreachable)}, which only this machine can reach",
            expected="an address that the hosts reach",
            fix="Leave --coordinator out (and unset SHOAL_COORDINATOR): the run then starts a"
            " cluster on this machine, for these hosts too.",
        )


def _parsed(kind: Any, tokens: Sequence[Any]) -> tuple[RunHost, ...]:
    return parse_hosts(str(tokens[-1].value))


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Hosts on which workers are started over ssh."""

    hosts: Annotated[
        Sequence[RunHost],
        Parameter(
            name="--hosts",
            metavar="HOST[:N],...",
            group=_GROUP,
            converter=_parsed,
            n_tokens=1,
            json_list=False,
            json_dict=False,
        ),
    ] = ()
    """Start workers on these hosts, over ssh: N on each, or as many as -n says. localhost: this
    machine. A host that cannot be reached is reported and left out. Without --coordinator, the
    run starts a cluster on this machine for them."""
    num_nodes: Annotated[str, Parameter(name="--nnodes", metavar="N|MIN:MAX", group=_GROUP)] = ""
    """Number of hosts, as for torchrun. The run does not begin if fewer than MIN of --hosts can be
    used. --min is raised to the number of workers on the MIN hosts with the fewest workers. The run
    is refused if fewer than MIN hosts could together have that many workers."""
    python: Annotated[str, Parameter(name="--host-python", metavar="PATH", group=_GROUP)] = ""
    """Python with Shoal on the hosts. By default the path of the Python that runs this command."""
    address: Annotated[str, Parameter(name="--host-address", metavar="ADDRESS", group=_GROUP)] = ""
    """Address of this machine for the hosts. By default the address that their ssh servers see as
    the client's."""

    def __post_init__(self) -> None:
        if not self.hosts:
            self._check_alone()
            return
        least, most = self._nodes()
        if not 1 <= least <= most or len(self.hosts) > most or least > len(self.hosts):
            raise InvalidSpec(
                "--nnodes does not fit --hosts",
                seen=f"--nnodes {self.num_nodes} with {len(self.hosts)} hosts",
                expected="N or MIN:MAX, with at least MIN and at most MAX hosts",
            )

    def _check_alone(self) -> None:
        if self.num_nodes not in ("", "1", "1:1"):
            raise InvalidSpec(
                "`shoal run` starts the workers of one host",
                seen=f"--nnodes {self.num_nodes} without --hosts",
                expected="--hosts HOST,HOST, or the same command on each host, with one"
                " --coordinator and one --job",
                fix="--min and --max bound the number of workers over all hosts; --desired is the"
                " number with which the job starts.",
            )
        if self.python or self.address:
            raise InvalidSpec(
                "--host-python and --host-address are for --hosts",
                seen="no --hosts",
                expected="--hosts HOST,HOST",
            )

    @property
    def min_nodes(self) -> int:
        """Least number of hosts; 0: any number."""
        return self._nodes()[0] if self.num_nodes else 0

    def _nodes(self) -> tuple[int, int]:
        if not self.num_nodes:
            return 1, MAX_HOSTS
        least, _, most = self.num_nodes.partition(":")
        try:
            return int(least), int(most or least)
        except ValueError:
            return 0, 0
