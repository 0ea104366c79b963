"""Coordinator replicas as processes on one etcd: who leads, killing the one that does."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
from network import Network, Wire

from shoal_client.local.process import Command, Process, Supervisor

START_S = 60.0
TAKE_OVER_S = 60.0
LEADER_LEASE_S = 2.0
"""As short as etcd grants it."""
HEARTBEAT_S = 0.5
"""Not shorter: a test machine may be slow, and a living member must not be taken for lost."""

Found = TypeVar("Found")


def awaited(look: Callable[[], Found | None], within_s: float, what: str) -> Found:
    """What `look` finds in another process, which can only be asked again and again."""
    deadline_s = time.monotonic() + within_s
    while (found := look()) is None:
        assert time.monotonic() < deadline_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.02)
    return found


class Replica:
    """A `shoal coordinator` process."""

    def __init__(self, supervisor: Supervisor, directory: Path, name: str, to_etcd: Wire) -> None:
        self.name = name
        self.to_etcd = to_etcd
        self.log_path = directory / f"{name}.log"
        self._ready_path = directory / f"{name}.json"
        arguments = [
            *(sys.executable, "-m", "shoal_client", "coordinator"),
            *("--etcd", ",".join(to_etcd.endpoints)),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--heartbeat-s", str(HEARTBEAT_S), "--leader-lease-s", str(LEADER_LEASE_S)),
            *("--ready-file", str(self._ready_path)),
        ]
        command = Command(name=name, arguments=arguments, log_path=self.log_path)
        self.process: Process = supervisor.spawn(command)
        self.grpc = self.http = ""

    @property
    def runs(self) -> bool:
        return self.process.exit_code is None

    def serving(self) -> "Replica":
        """Wait until it serves; its own log explains a failure."""
        awaited(self._addresses, START_S, f"{self.name} serves")
        return self

    def _addresses(self) -> bool | None:
        assert self.process.exit_code is None, self.log_path.read_text()
        if not self._ready_path.exists():
            return None
        addresses = json.loads(self._ready_path.read_text())
        self.grpc, self.http = addresses["grpc"], addresses["http"]
        return True

    def follows(self, leader: str) -> bool:
        """Whether it serves and says that the one at `leader` leads."""
        try:
            answer = httpx.get(f"{self.http}/readyz", timeout=1.0)
        except httpx.HTTPError:
            return False
        return answer.status_code == 503 and leader in answer.text

    def leads(self) -> bool:
        """Whether it says that it leads; False too for one that cannot be asked."""
        try:
            return httpx.get(f"{self.http}/readyz", timeout=1.0).status_code == 200
        except httpx.HTTPError:
            return False


class Replicas:
    """Several replicas on one etcd, each with a wire of its own to it.

    Those that a test has ended are replaced when asked for.
    """

    def __init__(
        self, supervisor: Supervisor, directory: Path, network: Network, etcd: Sequence[str]
    ) -> None:
        self._supervisor = supervisor
        self._directory = directory
        self._network = network
        self._etcd = etcd
        self._started = 0
        self._replicas: list[Replica] = []

    def full(self, size: int) -> "Replicas":
        """So many run, and one of them leads."""
        self._replicas = [each for each in self._replicas if each.runs]
        fresh = [self._add() for _ in range(size - len(self._replicas))]
        for each in fresh:
            each.serving()
        self.leader()
        return self

    def _add(self) -> Replica:
        self._started += 1
        name, wire = f"coordinator-{self._started}", self._network.wire(*self._etcd)
        self._replicas.append(Replica(self._supervisor, self._directory, name, wire))
        return self._replicas[-1]

    def leader(self, *, other_than: Replica | None = None) -> Replica:
        """The replica that leads, as soon as there is one."""

        def look() -> Replica | None:
            asked = [each for each in self._replicas if each.runs and each is not other_than]
            return next((each for each in asked if each.leads()), None)

        return awaited(look, TAKE_OVER_S, "a replica leads")

    @property
    def addresses(self) -> list[str]:
        """What a worker is given: those that run."""
        return [each.grpc for each in self._replicas if each.runs]


__all__ = ["HEARTBEAT_S", "LEADER_LEASE_S", "TAKE_OVER_S", "Replica", "Replicas", "awaited"]
