"""Hosts in separate network namespaces, and a router that can drop packets between two hosts.

A TCP forwarder cannot do this: here a server's connections to etcd, to other servers, to the
coordinator and to workers are cut independently, in one direction or both, and the sockets at both
ends see only silence. Needs root, veth devices and policy routing.

Nothing remains afterwards: a namespace and its devices exist as long as its process.
"""

import ctypes
import os
import random
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Self

from support.processes.served_process import awaited

from shoal_client.local.process import ChildCommand, Process, Supervisor

START_S = 10.0
CLONE_NEWNET = 0x40000000
RULE_PRIORITY = "100"
HERE = "here"
"""Host of this process, in the namespace that it was started in."""


class Loss(StrEnum):
    """Fate of a packet that is not forwarded."""

    DROPPED = "blackhole"
    """Dropped without notice."""
    REFUSED = "unreachable"
    """Rejected: its sender is notified that there is no route."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Packets from one host to another that are not forwarded."""

    source: str
    target: str
    loss: Loss


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host: a network namespace with one address."""

    name: str
    address: str
    path: str
    """Path of the namespace, for `setns`."""

    def enter(self) -> None:
        """Move this process, which must have one thread only, into the namespace."""
        with Path(self.path).open("rb") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.path}")


class SupervisorOn(Supervisor):
    """Starts children on a host, by the given supervisor, which also ends them."""

    def __init__(self, supervisor: Supervisor, host: Host) -> None:
        self._supervisor = supervisor
        self._host = host

    def spawn(self, command: ChildCommand) -> Process:
        arguments = ("nsenter", f"--net={self._host.path}", *command.arguments)
        return self._supervisor.spawn(replace(command, arguments=arguments))


class RoutedHosts:
    """A router, and the hosts that are added, within a `with` block. Usable from any thread."""

    def __init__(self) -> None:
        self._supervisor = Supervisor(grace_s=0.5)
        self._hosts: dict[str, Host] = {}
        self._cuts: set[Cut] = set()
        self._lock = threading.Lock()
        self._router = ""
        self._network = ""
        self._device = ""

    def __enter__(self) -> Self:
        self._supervisor.__enter__()
        try:
            self._router = self._new_namespace("router")
            self._in_router("sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._join_here()
        except BaseException:
            self._supervisor.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # The kernel removes a namespace later; the device in this process's own is deleted now.
        _call("ip", "link", "delete", self._device)
        self._supervisor.close()

    @property
    def here(self) -> Host:
        return self._hosts[HERE]

    def add(self, name: str) -> Host:
        """Return the host of this name, which is created if needed. It reaches all others."""
        with self._lock:
            if name not in self._hosts:
                self._hosts[name] = self._new_host(name)
            return self._hosts[name]

    def cut(self, cuts: Sequence[Cut]) -> None:
        """Stop forwarding these packets."""
        with self._lock:
            for cut in set(cuts) - self._cuts:
                self._rule("add", cut)
                self._cuts.add(cut)

    def restore(self) -> None:
        """Forward all packets again."""
        with self._lock:
            for cut in tuple(self._cuts):
                self._rule("delete", cut)
                self._cuts.discard(cut)

    def _rule(self, act: str, cut: Cut) -> None:
        source, target = self._hosts[cut.source].address, self._hosts[cut.target].address
        between = ("from", source, "to", target, cut.loss.value)
        self._in_router("ip", "rule", act, *between, "priority", RULE_PRIORITY)

    def _join_here(self) -> None:
        """Connect the test's own namespace as a host like the others."""
        # A random /24 network of the addresses reserved for benchmarks (RFC 2544).
        self._network = f"198.{random.choice((18, 19))}.{random.randrange(256)}"
        self._device = f"shoal{os.getpid() % 100_000}-{random.randrange(1000)}"
        mine, router = self._addresses()
        link = ("type", "veth", "peer", "name", "here", "netns", _holder(self._router))
        _call("ip", "link", "add", "name", self._device, *link)
        _call("ip", "address", "add", f"{mine}/31", "dev", self._device)
        _call("ip", "link", "set", self._device, "up")
        self._in_router("ip", "address", "add", f"{router}/31", "dev", "here")
        self._in_router("ip", "link", "set", "here", "up")
        _call("ip", "route", "add", f"{self._network}.0/24", "via", router)
        self._hosts[HERE] = Host(name=HERE, address=mine, path=f"/proc/{os.getpid()}/ns/net")

    def _new_host(self, name: str) -> Host:
        path = self._new_namespace(name)
        mine, router = self._addresses()
        device = f"to{len(self._hosts)}"
        link = ("type", "veth", "peer", "name", "eth0", "netns", _holder(path))
        self._in_router("ip", "link", "add", "name", device, *link)
        self._in_router("ip", "address", "add", f"{router}/31", "dev", device)
        self._in_router("ip", "link", "set", device, "up")
        inside = ("nsenter", f"--net={path}", "ip")
        _call(*inside, "link", "set", "lo", "up")
        _call(*inside, "address", "add", f"{mine}/31", "dev", "eth0")
        _call(*inside, "link", "set", "eth0", "up")
        _call(*inside, "route", "add", "default", "via", router)
        return Host(name=name, address=mine, path=path)

    def _addresses(self) -> tuple[str, str]:
        """Return the addresses of the next host, and of the router on the link to it."""
        first = 2 * len(self._hosts)
        assert first < 256, "as many hosts as a network of this size has"
        return f"{self._network}.{first}", f"{self._network}.{first + 1}"

    def _new_namespace(self, name: str) -> str:
        ours = Path("/proc/self/ns/net").stat().st_ino
        command = ("unshare", "--net", "sleep", "infinity")
        holder = self._supervisor.spawn(
            ChildCommand(name=f"namespace of {name}", arguments=command)
        )
        path = Path(f"/proc/{holder.pid}/ns/net")

        def look() -> bool:
            assert holder.exit_code is None, f"no network namespace for {name}"
            return path.stat().st_ino != ours

        awaited(look, START_S, f"a network namespace for {name}")
        return str(path)

    def _in_router(self, *arguments: str) -> None:
        _call("nsenter", f"--net={self._router}", *arguments)


def _holder(path: str) -> str:
    return path.split("/")[2]


def _call(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(arguments)}: {done.stderr.strip()}")


@cache
def why_unavailable() -> str:
    """Return the reason why hosts are not possible on this machine; empty if they are."""
    try:
        with RoutedHosts() as hosts:
            a = hosts.add("a")
            cut = Cut(source=HERE, target=a.name, loss=Loss.DROPPED)
            hosts.cut([cut])
            hosts.restore()
    except (OSError, AssertionError) as error:
        return f"no network namespaces here: {error}"
    return ""


__all__ = ["HERE", "Cut", "Host", "Loss", "RoutedHosts", "SupervisorOn", "why_unavailable"]
