"""Current state of a job's shards: the map from etcd, and the state from each server."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import grpc
import grpc.aio
import structlog

from shoal_proto.status import from_rpc_error
from shoal_proto.tls.channels import material, open_aio_channel
from shoal_proto.tls.files import TlsMaterial
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.v1.parameters_pb2 import DescribeReply, DescribeRequest, ShardState
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.core.shards.loads import ShardMeasure
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.records import servers as registered
from shoal_server.etcd.records import shard_map
from shoal_server.serving.rpc import CHANNEL_OPTIONS
from shoal_server.status.views import (
    AcceptedLossView,
    ComparedPiecesView,
    CopyView,
    FullPeerView,
    LoopLagView,
    LostShardView,
    PushesView,
    ReplicationView,
    ServerView,
    ShardsView,
    ShardView,
)

log = structlog.get_logger(__name__)

MAX_AGE_S = 1.0
ANSWER_WITHIN_S = 1.0
MAX_JOBS = 64


@dataclass(frozen=True, kw_only=True)
class _Answer:
    server_id: str
    address: str
    reply: DescribeReply | None
    error: str


class ShardReader:
    """Reads shards for the status page. Asks the servers of a job at most once in MAX_AGE_S. A
    server that does not answer in time is shown as unreachable, or as gone if it is not
    registered."""

    def __init__(self, store: Keyspace) -> None:
        self._store = store
        self._channels: dict[tuple[str, TlsMaterial | None], grpc.aio.Channel] = {}
        self._answers: dict[str, tuple[float, ShardsView | None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(self, job: str) -> ShardsView | None:
        """The job's shards; None if it has none. Raises Unavailable without etcd, and InternalError
        for records that do not parse."""
        async with self._locks.setdefault(job, asyncio.Lock()):
            read_at_s, view = self._answers.get(job, (float("-inf"), None))
            if time.monotonic() - read_at_s > MAX_AGE_S:
                view = await self._read(job)
                self._answers.pop(job, None)
                self._answers[job] = (time.monotonic(), view)
                if len(self._answers) > MAX_JOBS:
                    del self._answers[next(iter(self._answers))]
        return view

    async def measure(self, job: str) -> Mapping[int, ShardMeasure]:
        """Measure of each shard, as reported by its primary. Shards without values, or of silent
        servers, are missing. Raises what `read` raises."""
        view = await self.read(job)
        created = view.shards if view is not None else ()
        return {
            shard.shard_id: ShardMeasure(
                version=shard.version, pushed_bytes=shard.pushes.applied_bytes
            )
            for shard in created
            if shard.created
        }

    async def close(self) -> None:
        """Close the channels to the servers."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

    async def _read(self, job: str) -> ShardsView | None:
        found = await shard_map.read_held(self._store, job)
        if found is None:
            return None
        shards, held = found[0].shards, found[1]
        listed = await registered.read(self._store)
        present = {server.holder.server_id: server for server in listed}
        addresses = {shard.server_id: shard.address for shard in shards}
        used = {*addresses.values(), *(server.address for server in listed)}
        await self._forget_channels_but(used)
        answers = await asyncio.gather(
            *(self._ask(job, server, address) for server, address in sorted(addresses.items()))
        )
        view = _view(shards, answers, present)
        return view if held is None else _with_losses(view, shards, held)

    async def _ask(self, job: str, server_id: str, address: str) -> _Answer:
        key = address, material()
        channel = self._channels.get(key)
        if channel is None:
            channel = open_aio_channel(address, SERVER_NAME, CHANNEL_OPTIONS)
            self._channels[key] = channel
        try:
            stub = ParametersStub(channel)
            reply = await stub.Describe(DescribeRequest(job=job), timeout=ANSWER_WITHIN_S)
        except grpc.aio.AioRpcError as error:
            reason = str(from_rpc_error(error, address))
            log.info("parameter_server_silent", server=server_id, reason=reason)
            return _Answer(server_id=server_id, address=address, reply=None, error=reason)
        return _Answer(server_id=server_id, address=address, reply=reply, error="")

    async def _forget_channels_but(self, addresses: set[str]) -> None:
        # Bounds the channels to servers that are gone.
        if len(self._channels) > 4 * max(len(addresses), 16):
            kept = {(address, material()) for address in addresses}
            gone = [self._channels.pop(key) for key in set(self._channels) - kept]
            # Another job may be asking one of them.
            await asyncio.gather(*(channel.close(ANSWER_WITHIN_S) for channel in gone))


def _view(
    shards: Sequence[Shard],
    answers: Sequence[_Answer],
    present: Mapping[str, registered.Server],
) -> ShardsView:
    states = {
        (answer.server_id, state.shard_id): state
        for answer in answers
        if answer.reply is not None
        for state in answer.reply.shards
    }
    views = tuple(
        _shard_view(shard, states.get((shard.server_id, shard.shard_id))) for shard in shards
    )
    return ShardsView(
        servers=tuple(_server_view(answer, present) for answer in answers),
        shards=views,
        skew=_skew(views),
    )


def _with_losses(view: ShardsView, shards: Sequence[Shard], held: JobAssignments) -> ShardsView:
    tables = {shard.shard_id: shard.table for shard in shards}
    return replace(
        view,
        lost=tuple(
            _lost_view(held.job, gone, tables.get(gone.shard_id, "")) for gone in losses.lost(held)
        ),
        lost_in_words=tuple(losses.losses_in_words(held.job, losses.lost(held))),
        accepted_losses=tuple(
            AcceptedLossView(
                shard_id=shard.shard_id,
                version=accepted.loss.version,
                lost_unix_s=accepted.loss.lost_unix_s,
                accepted_unix_s=accepted.accepted_unix_s,
                by=accepted.by,
                samples_anew=accepted.samples_anew,
            )
            for shard in held.shards
            if (accepted := shard.accepted_loss) is not None
        ),
    )


def _lost_view(job: str, gone: ShardAssignment, table: str) -> LostShardView:
    why, loss = losses.explained(job, gone), gone.loss
    of_table = f" (of table {table})" if table else ""
    return LostShardView(
        shard_id=gone.shard_id,
        table=table,
        version=loss.version if loss is not None else 0,
        lost_unix_s=loss.lost_unix_s if loss is not None else 0.0,
        servers=loss.servers if loss is not None else (),
        on_disk=gone.on_disk,
        snapshot=loss.snapshot if loss is not None else "",
        told=f"{why.what}{of_table}: {losses.known_version(loss)}. {why.fix}",
    )


def _skew(shards: Sequence[ShardView]) -> float:
    # The bytes of a silent server are not known: 0 would count as an empty server.
    led: dict[str, int] = {}
    for shard in (each for each in shards if each.created):
        led[shard.server_id] = led.get(shard.server_id, 0) + shard.num_bytes
    total = sum(led.values())
    return max(led.values()) * len(led) / total if total else 1.0


def _server_view(answer: _Answer, present: Mapping[str, registered.Server]) -> ServerView:
    if answer.reply is not None:
        state = "serving"
    else:
        state = "unreachable" if answer.server_id in present else "gone"
    reply = answer.reply or DescribeReply()
    server = present.get(answer.server_id)
    return ServerView(
        server_id=answer.server_id,
        address=answer.address,
        state=state,
        error=answer.error,
        memory_bytes=reply.memory_bytes,
        num_copies=reply.num_copies,
        unfinished_bytes=reply.unfinished_bytes,
        refused_by_epoch=reply.refused_by_epoch,
        partial_pushes=reply.partial_pushes,
        held_bytes=reply.held_bytes,
        memory_limit_bytes=reply.memory_limit_bytes,
        torch_version="" if server is None else server.torch_version,
        loop_lag=LoopLagView(p99_s=reply.loop_lag_p99_s, max_s=reply.loop_lag_max_s),
        compared=ComparedPiecesView(
            same=reply.compared_pieces - reply.differing_pieces,
            different=reply.differing_pieces,
        ),
        full_peers=tuple(
            FullPeerView(server_id=peer.server_id, reason=peer.reason) for peer in reply.full_peers
        ),
    )


def _shard_view(shard: Shard, state: ShardState | None) -> ShardView:
    state = state or ShardState()
    copies = tuple(
        CopyView(server_id=copy.server_id, version=copy.version, joining=copy.joining)
        for copy in state.copies
    )
    return ShardView(
        shard_id=shard.shard_id,
        server_id=shard.server_id,
        epoch=shard.epoch,
        dtype=shard.dtype,
        num_elements=sum(block.num_elements for block in shard.blocks),
        parameters=tuple(dict.fromkeys(block.parameter for block in shard.blocks)),
        created=state.version > 0,
        version=state.version,
        num_bytes=state.num_bytes,
        pushes=PushesView(
            applied=state.pushes,
            applied_bytes=state.pushed_bytes,
            duplicates=state.duplicates,
            refused=state.refused,
            staleness_counts=tuple(state.staleness_counts),
        ),
        replication=ReplicationView(
            copies=copies,
            lag=max((state.version - c.version for c in copies if not c.joining), default=0),
            unreplicated_bytes=state.unreplicated_bytes,
        ),
    )
