"""Separate hosts for processes of one machine: network namespaces joined by slow links.

Each namespace has one interface, whose other end is on a bridge; both ends send no faster than the
rate of the link. The bridge is in a namespace too: the network of the machine itself is not
changed, and removing the namespaces removes all interfaces.
"""

import os
import secrets
import subprocess
from contextlib import ExitStack
from types import TracebackType
from typing import Self

BURST = "32kb"
QUEUE = "200ms"
"""Longest wait of data before an interface; TCP fills this queue, and loses few packets."""
NOT_ROOT = """Shaped links need root, for network namespaces and traffic control.
    sudo .venv/bin/python bench/NAME.py"""


class ShapedLinks:
    """Hosts that exist for the duration of a `with` block, with links of `megabits` Mb/s."""

    def __init__(self, num_hosts: int, *, megabits: int) -> None:
        self._num_hosts = num_hosts
        self._megabits = megabits
        self._token = secrets.token_hex(3)
        self._made = ExitStack()
        self.hosts: list[str] = []
        """Names of the namespaces, for `ip netns exec`."""

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise SystemExit(NOT_ROOT)
        with ExitStack() as made:
            self._make(made)
            self._made = made.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._made.close()

    def _make(self, made: ExitStack) -> None:
        hub = self._namespace("hub", made)
        _ip(hub, "link add bridge0 type bridge")
        _ip(hub, "link set bridge0 up")
        for number in range(self._num_hosts):
            host = self._namespace(str(number), made)
            self.hosts.append(host)
            _ip(hub, f"link add port{number} type veth peer name eth0 netns {host}")
            _ip(hub, f"link set port{number} master bridge0 up")
            _ip(host, f"address add {self.address(number)}/24 dev eth0")
            _ip(host, "link set lo up")
            _ip(host, "link set eth0 up")
            self._shape(hub, f"port{number}")
            self._shape(host, "eth0")

    def _namespace(self, part: str, made: ExitStack) -> str:
        name = f"shoal-{self._token}-{part}"
        _run("ip", "netns", "add", name)
        made.callback(_run, "ip", "netns", "delete", name)
        return name

    def _shape(self, namespace: str, interface: str) -> None:
        shape = f"tbf rate {self._megabits}mbit burst {BURST} latency {QUEUE}"
        _run("tc", "-n", namespace, *f"qdisc add dev {interface} root {shape}".split())


def _ip(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


__all__ = ["NOT_ROOT", "ShapedLinks"]
