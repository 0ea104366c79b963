"""Coordinators: the real service in processes that lead, are deposed, and lead again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from support.sim.event_loop import LoopProcess, remote
from support.sim.publications.etcd import SimEtcd, SimKeyspace
from support.sim.publications.servers import SimCalls, SimServer

from shoal_proto.errors import NotLeader, RetryError
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker
from shoal_server.etcd.api import Compare
from shoal_server.etcd.leader_store import LeaderStore


async def no_cursor(job: str) -> None:
    """Return no sample ledger."""


UNIX_S = 1_700_000_000.0
PART_WAIT_S = 20.0


class SimCoordinator:
    """A coordinator's process. The world makes it lead; etcd shows if it still leads."""

    def __init__(self, etcd: SimEtcd, name: str, servers: dict[str, SimServer]) -> None:
        self.etcd = etcd
        self.process = LoopProcess(etcd.clock, name)
        self._conditions: Sequence[Compare] | None = None
        self._is_ready = False
        self.num_terms = 0
        self.is_over = False
        """True if this coordinator has ended its newest term."""
        self._over = asyncio.Event()
        self._leading = asyncio.Lock()
        self._newest: Sequence[Compare] = ()
        store = LeaderStore(
            cast("Any", SimKeyspace(etcd, self.process)), self._leadership, self._deposed
        )
        calls = cast("Any", SimCalls(self.process, servers))
        position = JobPosition(cursor=no_cursor, training=lambda job: {})
        self.service = WeightSeriesService(
            store,
            calls,
            SnapshotTaker(store, calls, position).publish,
            authorize=self._authorize,
            require_leading=self._require_leading,
            is_job=lambda job: job == "rl",
            clock=lambda: UNIX_S + self.process.now_s,
            call_wait_s=PART_WAIT_S,
        )

    def lead(self, conditions: Sequence[Compare]) -> None:
        """Begin a term, once the previous one has ended."""
        self.num_terms += 1
        self.process.act(0.0, lambda: self.process.start(self._lead(conditions)) and None)

    def end_term(self, term: int) -> None:
        """End this term of the coordinator, if it is the newest one."""
        if term == self.num_terms:
            self.process.act(0.0, self._over.set)

    async def _lead(self, conditions: Sequence[Compare]) -> None:
        self._newest = conditions
        self._over.set()
        async with self._leading:  # one term at a time, as in a coordinator's loop
            if self._newest is conditions:
                await self._lead_until_over(conditions)

    async def _lead_until_over(self, conditions: Sequence[Compare]) -> None:
        self._over = asyncio.Event()
        self._conditions = conditions
        self.is_over = False
        try:
            async with self.service.leading():
                self._is_ready = True
                await self._over.wait()
        except (NotLeader, RetryError):
            pass  # another coordinator was elected, or will be
        finally:
            self._is_ready, self._conditions = False, None
            self.is_over = True

    def _leadership(self) -> Sequence[Compare]:
        if self._conditions is None:
            raise NotLeader("this coordinator does not lead", details={"leader": ""})
        return self._conditions

    def _deposed(self, reason: str) -> None:
        self._over.set()

    def _require_leading(self) -> None:
        if not self._is_ready:
            raise NotLeader("this coordinator does not lead", details={"leader": ""})

    async def _authorize(self, token: Token) -> None:
        """Accept every caller: epochs alone must keep replaced publishers out."""


async def ask(
    etcd: SimEtcd,
    caller: LoopProcess,
    coordinators: Sequence[SimCoordinator],
    make: Callable[[WeightSeriesService], Any],
    timeout_s: float,
) -> Any:
    """Call the coordinators in random order until one does not answer that it is not the leader;
    return its answer. Raises its error, or NotLeader if none leads."""
    order = list(coordinators)
    etcd.clock.random.shuffle(order)
    for number, coordinator in enumerate(order):
        try:
            return await remote(
                etcd.network,
                caller,
                coordinator.process,
                lambda c=coordinator: make(c.service),  # type: ignore[misc]
                timeout_s,
            )
        except NotLeader:
            if number == len(order) - 1:
                raise
    raise AssertionError("there is no coordinator")
