"""Parameter servers with members that push all the time, and snapshots of them."""

import threading
from array import array
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from support.clusters.parameter_servers import ParameterServers

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.incarnation import public_id
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.coordinator.plug_in.options import SnapshotPolicy
from shoal_server.coordinator.servers.answering import answering
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.snapshots.restoring import RestoreResult, SnapshotRestorer
from shoal_server.coordinator.snapshots.service import SnapshotService
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker, TakenSnapshot
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.losses import RestoreAttempt
from shoal_server.etcd.records import assignments, snapshot_roots
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.storage import Storage

SHAPES = {f"w{i}": 300 + 100 * i for i in range(6)}
SCHEMA = [
    ParameterSpec(name=name, shape=[size], dtype="float64", group=i)
    for i, (name, size) in enumerate(SHAPES.items())
]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)] * len(SHAPES))
ADAM = OptimizerSpec(
    kind="adam",
    groups=[HyperParameters(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8)] * len(SHAPES),
)


def buffers(value: float) -> dict[str, memoryview]:
    """Make a buffer for each parameter, filled with one number. Each parameter is a separate shard,
    as it has its own group."""
    return {name: memoryview(array("d", [value] * size)).cast("B") for name, size in SHAPES.items()}


class Snapshots:
    """Takes and restores snapshots of `servers`, in a directory."""

    def __init__(self, servers: ParameterServers, directory: Path, job: str = "job") -> None:
        self.cursor: Mapping[str, Any] | None = None
        self.library = SnapshotLibrary(Storage(str(directory)), job)
        self._servers = servers
        self._calls = ServerCalls()
        servers.run(snapshot_roots.write(servers.store, [str(directory)]))
        state = JobPosition(cursor=self._read_cursor, training=lambda job: {"step": 3})
        self._taker = SnapshotTaker(servers.store, self._calls, state)
        self._restorer = SnapshotRestorer(
            servers.store, self._calls, self._forget_cursor, answering
        )
        servers.is_restoring = lambda job: job in self._restorer.under_way

    async def _read_cursor(self, job: str) -> Mapping[str, Any] | None:
        return self.cursor

    def _forget_cursor(self, job: str) -> None:
        self.cursor = None

    def taking(self, *, only_if_changed: bool = False) -> Coroutine[Any, Any, TakenSnapshot]:
        return self._taker.take(self.library, only_if_changed=only_if_changed)

    def take(self, *, only_if_changed: bool = False) -> TakenSnapshot:
        return self._servers.run(self.taking(only_if_changed=only_if_changed))

    async def restoring(self, number: int = 0, *, under_members: bool = False) -> RestoreResult:
        """Restore a snapshot; `under_members`: as if all shards were lost."""
        lost = await self.shards() if under_members else None
        return await self._restorer.restore(self.library, number, lost=lost)

    def restore(self, number: int = 0, *, under_members: bool = False) -> RestoreResult:
        return self._servers.run(self.restoring(number, under_members=under_members))

    def restore_lost(self, service: SnapshotService) -> RestoreAttempt:
        """Restore the job as the service does if all its shards are lost."""

        async def restored() -> RestoreAttempt:
            return await service.restore_lost(self.library.job, await self.shards())

        return self._servers.run(restored())

    async def shards(self) -> Sequence[ShardAssignment]:
        stored = await assignments.read(self._servers.store, self.library.job)
        return () if stored is None else stored.assignments.shards

    def service(self, policy: SnapshotPolicy) -> SnapshotService:
        return SnapshotService(policy, self._taker, self._restorer, lambda: None)

    def close(self) -> None:
        self._servers.run(self._calls.close())


class Pusher:
    """A member, each of whose pushes subtracts `weight` from every element of every shard."""

    def __init__(
        self, servers: ParameterServers, name: str, *, weight: float, optimizer: OptimizerSpec = SGD
    ) -> None:
        token = servers.admit(name)
        self.client = ParameterClient([servers.coordinator], lambda: token, timeout_s=20.0)
        self.client.place(SCHEMA)
        self.client.create(optimizer, buffers(0.0))
        self.values = buffers(0.0)
        self.client.pull(self.values)
        self.session = f"/shoal/v1/members/job/{name}#{public_id('one')}"
        self.num_pushed = 0
        self.gradient = buffers(weight)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_for_ever, name=name)
        self._failure: Exception | None = None
        self._reached = threading.Condition()

    def push(self) -> None:
        self.client.push(self.gradient, into=self.values)
        with self._reached:
            self.num_pushed += 1
            self._reached.notify_all()

    def start(self) -> "Pusher":
        self._thread.start()
        return self

    def wait_for_more(self, num_pushes: int, limit_s: float = 20.0) -> None:
        """Wait until `num_pushes` more pushes are acknowledged."""
        with self._reached:
            wanted = self.num_pushed + num_pushes
            assert self._reached.wait_for(lambda: self.num_pushed >= wanted, limit_s)

    def stop(self) -> None:
        """Stop pushing; raise the error that ended it, if any."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self.client.close()

    def _push_for_ever(self) -> None:
        try:
            while not self._stop.is_set():
                self.push()
        except Exception as error:  # noqa: BLE001 - for the thread that asked for the pushes
            self._failure = error


def start(
    opened: ExitStack, directory: Path, num_servers: int
) -> tuple[ParameterServers, Snapshots]:
    """Start servers and their snapshots, until the stack is closed."""
    servers = opened.enter_context(ParameterServers(num_servers))
    snapshots = Snapshots(servers, directory)
    opened.callback(snapshots.close)
    return servers, snapshots


def elements(values: Mapping[str, memoryview]) -> set[float]:
    """Return the set of all numbers in the buffers."""
    return {value for data in values.values() for value in data.cast("d")}


__all__ = ["ADAM", "SGD", "Pusher", "Snapshots", "buffers", "elements", "start"]
