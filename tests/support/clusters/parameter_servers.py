"""Real parameter servers and the Shards service, on an event loop in another thread."""

import json
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence, Set
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Literal, TypeVar

import grpc
import pytest
import torch
from support.clusters.memory_store import MemoryStore
from support.processes.loop_thread import LIMIT_S, LoopThread
from support.processes.served_process import awaited

from shoal_client.parameters.calls import ParameterCalls
from shoal_client.parameters.job_shards import JobShards
from shoal_client.parameters.servers import Attempt
from shoal_proto.errors import ShoalError
from shoal_proto.v1.clocks_pb2_grpc import add_ClocksServicer_to_server
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import DescribeReply, DescribeRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.samples_pb2_grpc import add_SamplesServicer_to_server
from shoal_proto.v1.shards_pb2 import AcceptLossRequest
from shoal_proto.v1.shards_pb2_grpc import add_ShardsServicer_to_server
from shoal_server.coordinator.clocks import ClocksService
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.coordinator.shards.automatic_restores import Restore
from shoal_server.coordinator.shards.controller import ShardController
from shoal_server.coordinator.shards.loss_acceptance import LossAcceptance
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.core.processes import MemberProcess
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.core.shards.losses import RestoreAttempt
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.parameters.config import ParameterServerConfig, WorkLimits
from shoal_server.parameters.process import RunningServer, running
from shoal_server.serving.rpc import bind, new_server
from shoal_server.status.shards import ShardReader

# One thread, like `serve`: threads within a kernel wait for each other if all cores are busy.
torch.set_num_threads(1)

T = TypeVar("T")

REBALANCING = "rebalancing"
"""Name of the coordinator's part that assigns shards to servers."""


def config(server_id: str, **changes: Any) -> ParameterServerConfig:
    """Make the config of a server on a free port of this machine. `running` replaces its etcd."""
    fields: dict[str, Any] = {
        "etcd": EtcdConfig(endpoints=("127.0.0.1:1",)),
        "listen": "127.0.0.1:0",
        "server_id": server_id,
        "work": WorkLimits(num_threads=2),
    }
    return ParameterServerConfig(**(fields | changes))


def servers_fixture(num_servers: int, scope: Literal["function", "module"] = "function") -> Any:
    """Return a fixture of running ParameterServers: `servers = servers_fixture(2)`."""

    @pytest.fixture(scope=scope)
    def servers() -> Iterator[ParameterServers]:
        with ParameterServers(num_servers) as servers:
            yield servers

    return servers


@contextmanager
def calls_to_shards(shard_ids: Collection[int]) -> Iterator[None]:
    """Let the clients' calls in the block reach these shards alone, like the calls of a member that
    ends before it has reached the others."""
    run = JobShards.run

    def limited(job: JobShards, attempt: Attempt[ParameterCalls]) -> int:
        return run(job, attempt, shard_ids=shard_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobShards, "run", limited)
        yield


async def anybody(token: Token) -> None:
    """Authorize every caller."""


class ParameterServers:
    """Parameter servers and a coordinator in this process: `with ParameterServers(2) as servers:`
    runs servers `ps-0` and `ps-1`.

    Their keys are in memory, or in a real etcd if its endpoint is given.
    """

    def __init__(
        self, num_servers: int, *, etcd: str = "", copies: int = 2, **changes: Any
    ) -> None:
        self._num_servers = num_servers
        self._etcd = etcd
        self._copies = copies
        self._changes = changes
        self._loop = LoopThread("servers")
        self._stacks: dict[str, AsyncExitStack] = {}
        self.servers: dict[str, RunningServer] = {}
        self.restore_lost: Restore | None = None
        """Called before shards without any holder are declared lost."""
        self.is_restoring: Callable[[str], bool] = lambda job: False
        """Returns True while a job's shards are loaded from a snapshot."""
        self.events: list[tuple[str, str, str]] = []
        """(job, kind, reason) of each event for the status page."""
        self.num_members = 1
        """Number of members that the coordinator counts when it shares samples."""
        self.refusal: ShoalError | None = None
        """Refusal for members that ask for samples or report their clocks."""
        self.num_refused = 0
        self.coordinator = ""
        self.store: KeyValueStore

    def __enter__(self) -> "ParameterServers":
        self._loop.start()
        self.run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        try:
            for name in list(self._stacks):
                self.stop(name)
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the servers' loop, and wait for its result."""
        return self._loop.run(work)

    async def _start(self) -> None:
        if self._etcd:
            self.store = EtcdClient(EtcdConfig(endpoints=(self._etcd,)))
        else:
            self.store = MemoryStore()
        stack = self._stacks["coordinator"] = AsyncExitStack()
        stack.push_async_callback(self.store.close)
        server = new_server()
        losses = self.losses = LossLog(lambda *event: self.events.append(event))
        self.samples = SamplesService(self.store, self._authorized, lambda job: self.num_members)
        await stack.enter_async_context(self.samples)
        add_SamplesServicer_to_server(self.samples, server)
        self._accepting = LossAcceptance(self.store, losses, self.samples, lambda: None)
        self.shards = ShardsService(self.store, anybody, self._copies, accepting=self._accepting)
        add_ShardsServicer_to_server(self.shards, server)
        self.clocks = ClocksService(
            self._authorized, self._lost, time.monotonic, stuck_after_s=LIMIT_S
        )
        add_ClocksServicer_to_server(self.clocks, server)
        self.coordinator = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
        await server.start()
        self.coordinator_server = server
        stack.push_async_callback(server.stop, None)
        reader = ShardReader(self.store)
        stack.push_async_callback(reader.close)
        controller = ShardController(
            self.store,
            self._restore,
            measure=reader.measure,
            loss_log=losses,
            is_restoring=self._loads,
        )
        rebalancing = AsyncExitStack()
        await rebalancing.enter_async_context(controller.working())
        self._stacks = {REBALANCING: rebalancing, **self._stacks}
        for i in range(self._num_servers):
            await self._add(f"ps-{i}", **self._changes)

    async def _authorized(self, token: Token) -> None:
        if self.refusal is not None:
            self.num_refused += 1
            raise self.refusal

    def _loads(self, job: str) -> bool:
        return self.is_restoring(job)

    async def _restore(self, job: str, lost: Sequence[ShardAssignment]) -> RestoreAttempt:
        if self.restore_lost is None:
            return RestoreAttempt(is_restored=False)
        return await self.restore_lost(job, lost)

    async def _lost(self, job: str, who: MemberProcess, reason: str) -> None:
        raise AssertionError(f"{who.member_id} of {job} was declared lost: {reason}")

    async def _add(self, server_id: str, etcd: str = "", **changes: Any) -> None:
        stack = AsyncExitStack()
        store = self.store
        if etcd:
            store = EtcdClient(EtcdConfig(endpoints=(etcd,)))
            stack.push_async_callback(store.close)
        self.servers[server_id] = await stack.enter_async_context(
            running(config(server_id, **changes), store)
        )
        # The coordinator and its store stop last.
        self._stacks = {server_id: stack, **self._stacks}

    def add(self, server_id: str, etcd: str = "", **changes: Any) -> RunningServer:
        """Start one more server. `etcd`: the endpoint that it uses; empty: the common store."""
        self.run(self._add(server_id, etcd, **changes))
        return self.servers[server_id]

    def stop(self, name: str) -> None:
        """Stop a server, the `coordinator`, or REBALANCING, which must stop before the
        coordinator."""
        self.run(self.stopped(name))

    async def stopped(self, name: str) -> None:
        """Stop a part as `stop` does; for callers on the servers' loop."""
        await self._stacks.pop(name).aclose()

    def lose(self, server_id: str, job: str = "job") -> None:
        """Replace the server, the last with shards of the job, by an empty process. Return when all
        shards are declared lost."""
        self.stop(server_id)
        self.add(server_id)

        def are_lost() -> bool:
            stored = self.run(assignments.read(self.store, job))
            assert stored is not None
            return all(s.content is ShardContent.LOST for s in stored.assignments.shards)

        awaited(are_lost, LIMIT_S, "all shards are declared lost")

    def accept_loss(self, job: str = "job") -> None:
        """Give up all lost shards, and count the job's samples anew."""
        self.run(self._accepting.accept(AcceptLossRequest(job=job)))

    @property
    def running(self) -> Set[str]:
        """Names of the parts that `stop` stops."""
        return self._stacks.keys()

    def describe(self, server_id: str) -> DescribeReply:
        with grpc.insecure_channel(self.servers[server_id].address) as channel:
            reply: DescribeReply = ParametersStub(channel).Describe(DescribeRequest(), timeout=10.0)
            return reply

    def versions(self, job: str = "job") -> dict[int, int]:
        """Return the version of each shard of the job, at its primary."""
        described = [self.describe(name) for name in self.servers if name in self._stacks]
        shards = [shard for each in described for shard in each.shards if shard.job == job]
        return {shard.shard_id: shard.version for shard in shards}

    def admit(self, member_id: str, *, job: str = "job", incarnation: str = "one") -> Token:
        """Make a member, and return its token."""
        value = json.dumps({"incarnation": incarnation}).encode()
        self.run(self.store.put(keys.member(job, member_id), value))
        return Token(job=job, generation=1, member_id=member_id, incarnation=incarnation)

    def expel(self, member_id: str, *, job: str = "job") -> None:
        """Fence the member's incarnation."""
        self.run(self._expel(member_id, job))

    async def _expel(self, member_id: str, job: str) -> None:
        key = keys.member(job, member_id)
        found = await self.store.get(key)
        await self.store.delete(key)
        if found is not None:
            self.clocks.member_lost(job, member_id, json.loads(found.value)["incarnation"])
