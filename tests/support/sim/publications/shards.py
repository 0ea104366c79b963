"""Shards of parameters and of a table, workers that push to them, and cuts through them.

The coordinator's SnapshotTaker, the barriers and the layouts of cuts are the code that ships.
Replication is not simulated: a shard whose server has died, or that is moved, is on another server
in the next second, with every step that was applied.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.sim.event_loop import LoopProcess
from support.sim.publications.segments import SimSegment

from shoal_proto.errors import RetryError, SnapshotFailed, Unavailable
from shoal_proto.v1 import snapshots_pb2 as snapshots
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.shards_pb2 import Block, ParameterSpec, Shard, ShardMap
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.steps import Shards, StepId
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put
from shoal_server.etcd.records import assignments, shard_map
from shoal_server.parameters.snapshot.barrier import BarrierPhase, SnapshotBarrier
from shoal_server.parameters.weights.store import SegmentOrigin
from shoal_server.snapshots import messages

if TYPE_CHECKING:
    from support.sim.publications.servers import SimServer
    from support.sim.publications.world import PublicationWorld

JOB, PLACEMENT_ID = "rl", "run"
NUM_DENSE = 2
NUM_SHARDS = NUM_DENSE + 1
"""Number of shards; the last one belongs to a table."""
ALL = frozenset(range(NUM_SHARDS))
ELEMENTS = 4
"""Elements of the parameter on each dense shard, and positions of the table's shard."""
ITEM_BYTES = 4
ROW_BYTES = 8 + 8 + ITEM_BYTES
WRITTEN_WITHIN_S = 20.0
LOOK_S = 0.1
PUSH_S = 5.0

Applied = Mapping[str, int]
"""The last step of each session that was applied; sessions push their steps in order."""


@dataclass
class SimShard:
    """A shard at its primary."""

    shard_id: int
    epoch: int = 1
    applied: dict[str, int] = field(default_factory=dict)

    def apply(self, step: StepId) -> None:
        last = self.applied.get(step.session, 0)
        assert step.sequence <= last + 1, f"{step} after {last}"
        self.applied[step.session] = max(last, step.sequence)

    @property
    def version(self) -> int:
        return sum(self.applied.values())


@dataclass(frozen=True)
class CutContent:
    """A shard's segment as it was made."""

    series: str
    shard_id: int
    applied: Applied
    data: bytes


@dataclass(frozen=True)
class _Frozen:
    shard_id: int
    epoch: int
    version: int
    applied: Applied


class SimShardHost:
    """Shards and barrier of one server's process, with the calls of `ShardSnapshots`."""

    def __init__(self, server: "SimServer", is_live: Callable[[str], bool]) -> None:
        self._server = server
        self._is_live = is_live
        self.led: dict[int, SimShard] = {}
        """Shards of which this process is the primary."""
        self._known: dict[int, int] = {}
        self._barrier = SnapshotBarrier()
        self._turned = asyncio.Event()
        self._frozen: dict[int, _Frozen] = {}
        self._cut_id = ""
        self._limit: asyncio.TimerHandle | None = None
        self.on_segment: Callable[[bytes, CutContent], None] = lambda digest, content: None

    async def push(self, shard_id: int, step: StepId) -> None:
        """Apply one part of a step. Raises Unavailable if this server does not lead the shard."""
        while not self._barrier.may_enter(step):
            await self._turned.wait()
        self._barrier.enter(step, ALL)
        try:
            await asyncio.sleep(self._server.etcd.clock.random.random() * 0.2)
            shard = self.led.get(shard_id)
            if shard is None:
                raise Unavailable(f"{self._server.server_id} does not lead shard {shard_id}")
            shard.apply(step)
        finally:
            self._barrier.leave(step, self._lacking)

    async def close(self, request: snapshots.CloseRequest) -> snapshots.CloseReply:
        if self._frozen:
            raise SnapshotFailed("another cut is being written")
        led = {each.shard_id: each.epoch for each in self.led.values()}
        for shard_id, epoch in led.items():
            if self._known.get(shard_id) != epoch:
                applied = self.led[shard_id].applied
                self._barrier.add_steps({StepId(s, n): ALL for s, n in applied.items()})
        self._known = led
        begun = self._barrier.close(request.cut_id)
        self._set_limit(request.cut_id, request.limit_s)
        return snapshots.CloseReply(begun=messages.encode_begun(begun))

    async def freeze(self, request: snapshots.FreezeRequest) -> snapshots.FreezeReply:
        self._barrier.drain(request.cut_id, messages.decode_begun(request.begun))
        self._set_limit()
        self._turn()
        try:
            await self._drained(request.wait_s)
            self._barrier.check(request.cut_id, BarrierPhase.DRAINING)
            torn = self._barrier.give_up_incomplete_steps(self._lacking)
            if torn and not request.take_torn:
                raise SnapshotFailed(f"{torn} did not end in time")
            if {each.shard_id: each.epoch for each in self.led.values()} != self._known:
                raise SnapshotFailed("the shards on this server changed during the cut")
            self._cut_id = request.cut_id
            self._frozen = {
                n: _Frozen(n, each.epoch, each.version, dict(each.applied))
                for n, each in sorted(self.led.items())
            }
            self._set_limit(request.cut_id, WRITTEN_WITHIN_S)
            stamps = [
                snapshots.ShardStamp(shard_id=each.shard_id, epoch=each.epoch, version=each.version)
                for each in self._frozen.values()
            ]
            of_torn = messages.encode_begun(dict.fromkeys(torn))
            return snapshots.FreezeReply(shards=stamps, torn=of_torn)
        finally:
            self._open(request.cut_id)

    async def publish(self, request: snapshots.PublishCutRequest) -> snapshots.PublishCutReply:
        if self._cut_id != request.cut_id:
            raise SnapshotFailed(f"cut {request.cut_id} is over")
        self._set_limit()
        try:
            found = []
            while self._frozen:
                frozen = next(iter(self._frozen.values()))
                found.append(await self._kept(request, frozen))
                self._frozen.pop(frozen.shard_id, None)
            return snapshots.PublishCutReply(segments=found)
        finally:
            self._abort(request.cut_id)

    async def abort(self, request: snapshots.AbortRequest) -> snapshots.AbortReply:
        self._abort(request.cut_id)
        return snapshots.AbortReply()

    async def _kept(self, request: snapshots.PublishCutRequest, frozen: _Frozen) -> pb.CutSegment:
        """Hold a shard's segment here and along the chain. Raises Unavailable if it is not on all
        of these servers."""
        data = json.dumps([request.series, frozen.shard_id, frozen.applied], sort_keys=True)
        segment = SimSegment(hashlib.sha256(data.encode()).digest(), data.encode())
        self.on_segment(
            segment.digest,
            CutContent(request.series, frozen.shard_id, frozen.applied, segment.data),
        )
        origin = SegmentOrigin(
            epoch=request.epoch, publication=request.publication, rank=frozen.shard_id + 1
        )
        chain = [each.id for each in request.chain]
        holders = await self._server.put(request.series, segment, origin, chain, replaces=True)
        if len(holders) <= len(chain):
            raise Unavailable(f"shard {frozen.shard_id} is only on {holders}")
        found = pb.CutSegment(shard_id=frozen.shard_id)
        found.segment.digest, found.segment.holders[:] = segment.digest, holders
        if frozen.shard_id < NUM_DENSE:
            offset = frozen.shard_id * ELEMENTS
            found.blocks.add(parameter="p", offset=offset, num_elements=ELEMENTS)
            found.segment.num_bytes = ELEMENTS * ITEM_BYTES
        else:
            found.rows.CopyFrom(
                pb.CutRows(
                    table="items",
                    dim=1,
                    dtype="float32",
                    num_rows=ELEMENTS,
                    births_at=8 * ELEMENTS,
                    values_at=16 * ELEMENTS,
                )
            )
            found.segment.num_bytes = ROW_BYTES * ELEMENTS
        return found

    def _lacking(self, step: StepId, shards: Shards) -> Sequence[int]:
        return [
            n for n, each in self.led.items() if each.applied.get(step.session, 0) < step.sequence
        ]

    async def _drained(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while self._barrier.waits_for(self._lacking, self._is_live):
            if loop.time() >= give_up_s:
                return
            await asyncio.sleep(LOOK_S)

    def _turn(self) -> None:
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    def _open(self, cut_id: str) -> None:
        if self._barrier.open(cut_id):
            self._set_limit()
            self._turn()

    def _abort(self, cut_id: str) -> None:
        self._open(cut_id)
        if self._cut_id == cut_id:
            self._frozen, self._cut_id = {}, ""
            self._set_limit()

    def _set_limit(self, cut_id: str = "", limit_s: float = 0.0) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None
        if cut_id:
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(limit_s, self._abort, cut_id)


class SimWorker:
    """A session that pushes steps to all shards, one step after the other."""

    def __init__(self, world: "PublicationWorld", session: str) -> None:
        self.world = world
        self.session = session
        self.process = LoopProcess(world.clock, f"worker {session}")
        self.acknowledged = 0
        """The last step that all shards have acknowledged."""

    def start(self) -> None:
        self.process.start(self._push_for_ever())

    async def _push_for_ever(self) -> None:
        chance = self.world.clock.random
        while True:
            step = StepId(self.session, self.acknowledged + 1)
            await asyncio.gather(*(self._push(shard_id, step) for shard_id in range(NUM_SHARDS)))
            self.acknowledged = step.sequence
            await asyncio.sleep(chance.random() * 0.5)

    async def _push(self, shard_id: int, step: StepId) -> None:
        chance = self.world.clock.random
        while True:
            await asyncio.sleep(chance.random() * 0.3)
            host = self.world.shards.primary(shard_id)
            if host is None:
                continue
            server = host._server
            try:
                await server.call(
                    self.process,
                    lambda h=host: h.push(shard_id, step),  # type: ignore[misc]
                    PUSH_S,
                )
            except RetryError:
                continue
            return


class ShardPlacement:
    """The primaries of all shards: moves those of dead servers, and records all in etcd."""

    def __init__(self, world: "PublicationWorld") -> None:
        self._world = world
        self._holders: dict[int, SimServer] = {}

    def place(self) -> None:
        """Give the shards to servers, and write the job's map."""
        servers = list(self._world.servers.values())
        layout = ShardMap(
            job=JOB,
            run=PLACEMENT_ID,
            parameters=[ParameterSpec(name="p", dtype="float32", shape=[NUM_DENSE * ELEMENTS])],
        )
        for shard_id in range(NUM_SHARDS):
            shard = Shard(shard_id=shard_id, dtype="float32")
            if shard_id < NUM_DENSE:
                offset = shard_id * ELEMENTS
                shard.blocks.append(Block(parameter="p", offset=offset, num_elements=ELEMENTS))
            else:
                shard.table = "items"
            layout.shards.append(shard)
            self._holders[shard_id] = server = servers[shard_id % len(servers)]
            server.shards.led[shard_id] = SimShard(shard_id)
        held = JobAssignments(
            job=JOB,
            copies=1,
            placement_id=PLACEMENT_ID,
            shards=tuple(map(self._assignment, range(NUM_SHARDS))),
        )
        stored = shard_map.stored(layout)
        self._put(
            *stored.chunks,
            stored.head,
            Put(keys.assignments_head(JOB), assignments.encode_head(held)),
            *(self._record(shard_id) for shard_id in range(NUM_SHARDS)),
        )

    def primary(self, shard_id: int) -> SimShardHost | None:
        """The host that leads a shard; None if its server is dead."""
        server = self._holders[shard_id]
        return server.shards if server.process.alive else None

    def replace_dead(self) -> None:
        """Move the shards of dead servers."""
        for shard_id, server in self._holders.items():
            if not server.process.alive:
                self.move(shard_id)

    def move(self, shard_id: int) -> None:
        """Move a shard to another server, if there is one and etcd answers."""
        old = self._holders[shard_id]
        others = [s for s in self._world.servers.values() if s.process.alive and s is not old]
        if not others or self._world.clock.now_s < self._world.etcd.back_s:
            return
        new = self._world.clock.random.choice(others)
        shard = old.shards.led.pop(shard_id)
        self._world.note(f"shard {shard_id} moves to {new.process.name}")
        new.shards.led[shard_id] = SimShard(shard_id, shard.epoch + 1, dict(shard.applied))
        self._holders[shard_id] = new
        self._put(self._record(shard_id))

    def _assignment(self, shard_id: int) -> ShardAssignment:
        server = self._holders[shard_id]
        return ShardAssignment(
            shard_id=shard_id,
            epoch=server.shards.led[shard_id].epoch,
            primary=Holder(server.server_id, server.incarnation),
            content=ShardContent.PRESENT,
        )

    def _record(self, shard_id: int) -> Put:
        value = assignments.encode_shard(PLACEMENT_ID, self._assignment(shard_id))
        return Put(keys.shard_assignment(JOB, PLACEMENT_ID, shard_id), value)

    def _put(self, *puts: Put) -> None:
        etcd: Any = self._world.etcd
        etcd.do(lambda: etcd.memory.transact((), puts))
