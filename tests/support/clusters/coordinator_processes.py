"""Coordinator replicas as processes on one etcd, which a test may kill or cut off."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from support.network import http
from support.network.gates import Network, Wire
from support.processes.served_process import ServedProcess, awaited

from shoal_client.local.process import Supervisor

TAKE_OVER_S = 60.0
LEADER_LEASE_S = 2.0
"""The shortest lease that etcd grants."""
HEARTBEAT_S = 0.5
"""Long enough that a living member does not count as lost on a slow test machine."""


class CoordinatorProcess(ServedProcess):
    """A `shoal coordinator` process."""

    def __init__(
        self,
        supervisor: Supervisor,
        directory: Path,
        name: str,
        etcd: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEADER_LEASE_S,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        is_loopback = listen.startswith("127.")
        super().__init__(
            supervisor,
            directory,
            name,
            *("coordinator", "--etcd", etcd, "--listen", listen),
            *(() if is_loopback else ("--insecure",)),
            *("--http", f"{listen.rpartition(':')[0]}:0"),
            *("--heartbeat-s", str(heartbeat_s), "--leader-lease-s", str(lease_s)),
            environment=environment,
        )

    def follows(self, leader: str) -> bool:
        """True if this coordinator serves, and names the one at `leader` as the leader."""
        answer = self._readyz()
        return answer is not None and answer.status_code == 503 and leader in answer.text

    def leads(self) -> bool:
        """True if this coordinator reports that it leads; False if it cannot be reached."""
        answer = self._readyz()
        return answer is not None and answer.status_code == 200

    def _readyz(self) -> httpx.Response | None:
        try:
            return http.get(f"{self.http}/readyz", timeout=1.0)
        except httpx.HTTPError:
            return None


class Replica(CoordinatorProcess):
    """Replica whose connection to etcd can be cut."""

    def __init__(self, supervisor: Supervisor, directory: Path, name: str, to_etcd: Wire) -> None:
        self.to_etcd = to_etcd
        super().__init__(supervisor, directory, name, ",".join(to_etcd.endpoints))


class Replicas:
    """Coordinator replicas on one etcd, each with a separate wire to it.

    `full` replaces replicas that a test has ended.
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
        """Start replicas until `size` run, and wait until one of them leads."""
        self._replicas = [each for each in self._replicas if each.runs]
        fresh = [self._add() for _ in range(size - len(self._replicas))]
        for each in fresh:
            each.ready()
        self.leader()
        return self

    def _add(self) -> Replica:
        self._started += 1
        name, wire = f"coordinator-{self._started}", self._network.wire(*self._etcd)
        self._replicas.append(Replica(self._supervisor, self._directory, name, wire))
        return self._replicas[-1]

    def leader(self, *, other_than: Replica | None = None) -> Replica:
        """Wait for a replica that leads, and return it."""

        def look() -> Replica | None:
            asked = [each for each in self._replicas if each.runs and each is not other_than]
            return next((each for each in asked if each.leads()), None)

        return awaited(look, TAKE_OVER_S, "a replica leads")

    @property
    def addresses(self) -> list[str]:
        """Addresses of the running replicas, for a worker."""
        return [each.grpc for each in self._replicas if each.runs]


__all__ = ["LEADER_LEASE_S", "TAKE_OVER_S", "CoordinatorProcess", "Replica", "Replicas"]
