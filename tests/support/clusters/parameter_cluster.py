"""Parameter servers as real processes, with etcd and a coordinator, all of which may be killed.

The servers are forked from a process that has already imported torch, so that a server restarts in
a moment after SIGKILL. They share only code: each has its own memory and sockets.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from operator import itemgetter
from pathlib import Path
from typing import Self

import grpc
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import TEST_OPTIONS
from support.network.gates import Network, Wire
from support.network.namespaces import Host, RoutedHosts, SupervisorOn
from support.network.ports import free_port
from support.processes.forking import forked
from support.processes.served_process import awaited

from shoal_client.local.etcd import start_etcd, start_members
from shoal_client.local.process import Supervisor
from shoal_proto.etcd.etcd_pb2_grpc import KVStub
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.wire import key_values, range_request
from shoal_server.parameters.config import ParameterServerConfig, WorkLimits
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.process import serve
from shoal_server.serving.options import ParameterServerServing

FAILED = 1
"""Exit code of a process that ended with an error."""
START_S = 30.0
CALL_S = 5.0
LEASE_S = 2.0
"""The shortest lease that etcd grants."""
LOGGED_OF_SHARDS = ("shard_", "copy_", "_lost", "replication_link_", "acknowledges_", "image_")
MAX_LOG_LINES = 400
LOG_TIME_CHARACTERS = len("2026-01-01 00:00:00")


def _serve(config: ParameterServerConfig, log_path: Path, host: Host | None) -> None:
    """Run a server process."""
    # Die with the parent, the forking process, which ends with the process that runs the tests.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(137)
    with log_path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if host is not None:
        host.enter()
    # Flush each line, so that the last ones before a SIGKILL are in the log.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ["GRPC_VERBOSITY"] = "NONE"
    asyncio.run(serve(config))


@dataclass
class Server:
    """A server id, and its current process."""

    server_id: str
    config: ParameterServerConfig
    log_path: Path
    wires: list[Wire] = field(default_factory=list)
    """Wire from all other processes to the server, and wire from the server to etcd."""
    host: Host | None = None
    """Host that the server runs on; None: the test's."""
    incarnation: str = ""
    """Incarnation of the server once it is registered; empty after it was killed."""

    def start(self) -> None:
        """Start a new process."""
        assert self.config.ready_file is not None
        self.config.ready_file.unlink(missing_ok=True)
        self.process: BaseProcess = forked.Process(
            target=_serve,
            args=(self.config, self.log_path, self.host),
            name=self.server_id,
            daemon=True,
        )
        self.process.start()

    @property
    def is_ready(self) -> bool:
        assert self.config.ready_file is not None
        assert self.process.is_alive(), self.log_path.read_text()[-4000:]
        return self.config.ready_file.exists()

    @property
    def found_no_etcd(self) -> bool:
        """True if the process has ended because no etcd answered at its start."""
        has_failed = self.process.exitcode == FAILED
        return has_failed and "no etcd answered" in self.log_path.read_text()[-4000:]

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and wait for its end, after which connections to it are broken."""
        self.incarnation = ""
        self.process.kill()
        self.process.join()

    def cut_off(self) -> None:
        """Drop all its traffic in both directions, without closing a connection."""
        for wire in self.wires:
            wire.silence()

    def restore(self) -> None:
        for wire in self.wires:
            wire.restore()


class ParameterCluster:
    """Cluster of parameter server processes with a coordinator and etcd: `with
    ParameterCluster(tmp_path, 3) as cluster:` has servers `ps-0` to `ps-2`, all ready."""

    def __init__(
        self,
        directory: Path,
        num_servers: int,
        network: Network | None = None,
        *,
        with_journals: bool = False,
        hosts: RoutedHosts | None = None,
    ) -> None:
        """`network`: gives every server its own wires, which can be cut. `hosts`: each server runs
        on a host named by its id, and etcd and the coordinator on hosts `etcd` and `coordinator`.
        `with_journals`: a restarted server finds its journal and its weights again."""
        self._with_journals = with_journals
        self._hosts = hosts
        self._directory = directory
        self._num_servers = num_servers
        self._network = network
        self._stack = ExitStack()
        self._num_coordinators = 0
        self.servers: dict[str, Server] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._supervisor = stack.enter_context(Supervisor(grace_s=1.0))
            directory = self._directory / "etcd"
            on, address = self._on("etcd")
            options = replace(TEST_OPTIONS, host=address)
            (self._etcd,) = start_etcd(on.spawn, directory, options)
            self._channel = stack.enter_context(grpc.insecure_channel(self._etcd.endpoint))
            self.coordinator = self._start_coordinator(f"{self._on('coordinator')[1]}:0")
            stack.callback(self._end_servers)
            for number in range(self._num_servers):
                self.start(f"ps-{number}")
            self.coordinator.ready()
            self.await_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _end_servers(self) -> None:
        for server in self.servers.values():
            server.process.kill()
        for server in self.servers.values():
            server.process.join()

    # --- servers ---

    def start(self, server_id: str) -> Server:
        """Start a server, or restart it under its id. Returns before the server is ready."""
        server = self.servers.get(server_id)
        if server is None:
            server = self.servers[server_id] = self._new(server_id)
        server.start()
        return server

    def _new(self, server_id: str) -> Server:
        host = None if self._hosts is None else self._hosts.add(server_id)
        address = "127.0.0.1" if host is None else host.address
        listen, advertise, etcd, wires = f"{address}:0", "", self._etcd.endpoint, []
        if self._network is not None:
            listen = f"127.0.0.1:{free_port()}"
            wires = [self._network.wire(listen), self._network.wire(etcd)]
            advertise, etcd = wires[0].endpoints[0], wires[1].endpoints[0]
        config = ParameterServerConfig(
            etcd=EtcdConfig(endpoints=(etcd,)),
            listen=listen,
            advertise=advertise,
            server_id=server_id,
            ready_file=self._directory / f"{server_id}.json",
            lease_ttl_s=LEASE_S,
            journal=JournalConfig(directory=self._directory / f"{server_id}-journal")
            if self._with_journals
            else None,
            weights_directory=self._directory / f"{server_id}-weights"
            if self._with_journals
            else None,
            work=WorkLimits(num_threads=2),
            # No other process is on the network of the hosts.
            reach=ParameterServerServing(insecure=host is not None),
        )
        return Server(server_id, config, self._directory / f"{server_id}.log", wires, host)

    def kill_all(self) -> None:
        """Kill every server before any can take over from another."""
        for server in self.present:
            server.send_signal(signal.SIGKILL)
        for server in self.present:
            server.kill()

    def dismiss(self, server: Server) -> None:
        """Ask a server to hand over its shards, and wait until it has ended."""
        server.send_signal(signal.SIGTERM)
        server.process.join(START_S)
        assert server.process.exitcode == 0, server.log_path.read_text()[-4000:]
        server.incarnation = ""

    def await_ready(self) -> None:
        """Wait until every started server serves. A server that found no etcd is restarted, as a
        supervisor does in production."""

        def serves(server: Server) -> bool:
            if server.found_no_etcd:
                server.start()
            return server.is_ready

        for server in self.servers.values():
            exit_code = server.process.exitcode
            if exit_code == FAILED or (not server.incarnation and exit_code is None):
                awaited(lambda s=server: serves(s), START_S, f"{server.server_id} serves")
                server.incarnation = self._incarnation(server.server_id)

    def _registered(self, server_id: str) -> dict[str, object]:
        # On a busy machine a lease sometimes expires, and the server registers again.
        key = keys.server(server_id)
        record = awaited(lambda: self.read(key), START_S, f"{server_id} is registered")
        found: dict[str, object] = json.loads(record[0].value)
        return found

    def _incarnation(self, server_id: str) -> str:
        incarnation = self._registered(server_id)["incarnation"]
        assert isinstance(incarnation, str)
        return incarnation

    def await_forgotten(self) -> None:
        """Wait until every server serves and no killed server is listed any more: a job placed
        earlier might get a killed one."""
        self.await_ready()
        self.await_unlisted()

    def await_unlisted(self) -> None:
        """Wait until no killed server is listed any more."""
        gone = set(self.servers) - {server.server_id for server in self.present}
        for server_id in gone:
            awaited(
                lambda key=server_id: not self.read(keys.server(key)),
                START_S,
                f"the lease of {server_id} runs out",
            )

    def address(self, server_id: str) -> str:
        """Return the address of a server."""
        address = self._registered(server_id)["address"]
        assert isinstance(address, str)
        return address

    @property
    def present(self) -> list[Server]:
        """Servers that run and are ready."""
        return [server for server in self.servers.values() if server.incarnation]

    def __getitem__(self, server_id: str) -> Server:
        return self.servers[server_id]

    # --- assignments ---

    def assignments(self, job: str) -> JobAssignments:
        """Read the current assignments of the job; none before its shards are placed."""
        found = records.parse_all(job, self.read(keys.assignments(job), prefix=True))
        return found or JobAssignments(job=job, copies=0, shards=())

    def primaries(self, job: str) -> list[Server]:
        """Return the servers that are primary of some shard."""
        found = {s.primary.server_id for s in self.assignments(job).shards}
        return [server for server in self.present if server.server_id in found]

    def is_in_step(self, job: str) -> bool:
        """True if every shard has as many live copies as possible, and none is in transfer."""
        alive = {(server.server_id, server.incarnation) for server in self.present}
        record = self.assignments(job)
        wanted = min(record.copies, len(alive))
        for shard in record.shards:
            holders = [(h.server_id, h.incarnation) for h in (shard.primary, *shard.backups)]
            if not alive.issuperset(holders) or len(holders) < wanted:
                return False
            if shard.joining is not None or shard.successor is not None:
                return False
        return bool(record.shards)

    def is_spread(self, job: str) -> bool:
        """True if the job is in step, and every server leads some shard."""
        return self.is_in_step(job) and len(self.primaries(job)) == len(self.present)

    def log_lines_about(self, job: str) -> list[str]:
        """Return log lines of the servers about a job's shards and each other, ordered by time in
        seconds; only the last MAX_LOG_LINES."""
        lines = [
            (line[:LOG_TIME_CHARACTERS], f"{server.server_id}: {line}")
            for server in self.servers.values()
            if server.log_path.exists()
            for line in server.log_path.read_text().splitlines()
            if any(event in line for event in LOGGED_OF_SHARDS)
            and ("job=" not in line or f"job={job} " in f"{line} ")
        ]
        # A stable sort keeps the order of one server's lines.
        return [line for _, line in sorted(lines, key=itemgetter(0))][-MAX_LOG_LINES:]

    def read(self, key: str, *, prefix: bool = False) -> Sequence[KeyValue]:
        request = range_request(key, prefix=prefix)
        reply = KVStub(self._channel).Range(request, timeout=CALL_S, wait_for_ready=True)
        return key_values(reply.kvs)

    # --- coordinator and etcd ---

    def _start_coordinator(self, listen: str) -> CoordinatorProcess:
        self._num_coordinators += 1
        return CoordinatorProcess(
            self._on("coordinator")[0],
            self._directory,
            f"coordinator-{self._num_coordinators}",
            self._etcd.endpoint,
            listen=listen,
        )

    def kill_coordinator(self) -> None:
        """Kill the coordinator and start another at its address. Returns before that serves."""
        self.coordinator.process.kill()
        self.coordinator.process.wait()
        self.coordinator = self._start_coordinator(self.coordinator.grpc)

    def kill_etcd(self) -> None:
        """Kill etcd, and restart it on its data."""
        self.end_etcd()
        self.restart_etcd()

    def end_etcd(self) -> None:
        """Kill etcd."""
        self._etcd.process.kill()
        self._etcd.process.wait()

    def restart_etcd(self) -> None:
        """Restart etcd on its data after `end_etcd`."""
        (self._etcd,) = start_members(self._on("etcd")[0].spawn, [self._etcd.member])

    def _on(self, name: str) -> tuple[Supervisor, str]:
        """Return the supervisor of a host's processes, and the host's address."""
        if self._hosts is None:
            return self._supervisor, "127.0.0.1"
        host = self._hosts.add(name)
        return SupervisorOn(self._supervisor, host), host.address

    def signal_etcd(self, number: int) -> None:
        self._etcd.process.send_signal(number)


__all__ = ["LEASE_S", "ParameterCluster", "Server"]
