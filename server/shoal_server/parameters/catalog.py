"""All the shards that a server holds, by job and id, and how a missing one is explained."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import structlog
from google.protobuf.message import DecodeError

from shoal_proto.errors import (
    DtypeMismatch,
    InternalError,
    ProposalConflict,
    ShapeMismatch,
    ShardNotReady,
    ShoalError,
    UnknownShard,
    WrongEpoch,
)
from shoal_proto.v1.parameters_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.shard import LiveShard

log = structlog.get_logger(__name__)


class Catalog:
    """Lives on the event loop; the shards themselves may be used from any thread."""

    def __init__(self, store: KeyValueStore, server_id: str) -> None:
        self._store = store
        self._server_id = server_id
        self._shards: dict[str, dict[int, LiveShard]] = {}
        self._changed = asyncio.Condition()

    def find(self, job: str, shard_id: int) -> LiveShard | None:
        return self._shards.get(job, {}).get(shard_id)

    async def look_up(
        self, job: str, wanted: Sequence[tuple[int, int]]
    ) -> list[LiveShard | ShoalError]:
        """For each (shard id, epoch) the shard, or the error that explains why it is not to be
        had: WrongEpoch, ShardNotReady or UnknownShard."""
        found: list[LiveShard | ShoalError] = []
        record: ShardMap | None = None
        for shard_id, epoch in wanted:
            shard = self.find(job, shard_id)
            if shard is None:
                record = record or await self._read_map(job)
                found.append(self._explain(job, shard_id, record))
            elif shard.spec.epoch != epoch:
                found.append(shard.wrong_epoch(epoch))
            else:
                found.append(shard)
        return found

    async def wait_for(self, job: str, shard_ids: Iterable[int], wait_s: float) -> None:
        """Return when all are there, or when the time is over."""
        wanted = list(shard_ids)

        def all_there() -> bool:
            return all(self.find(job, shard_id) is not None for shard_id in wanted)

        if wait_s <= 0 or all_there():
            return
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(all_there)
        except TimeoutError:
            return

    async def check_creatable(
        self, job: str, shards: Sequence[Shard], optimizer: OptimizerSpec
    ) -> None:
        """Raise unless the job's map has exactly these shards here, with no other optimizer."""
        record = await self._read_map(job)
        mapped = {shard.shard_id: shard for shard in record.shards} if record else {}
        for shard in shards:
            expected = mapped.get(shard.shard_id)
            if expected is None:
                raise self._explain(job, shard.shard_id, record)
            self._compare(shard, expected)
            held = self.find(job, shard.shard_id)
            if held is not None and held.optimizer_spec != optimizer:
                raise ProposalConflict(
                    f"shard {shard.shard_id} of job {job} has another optimizer",
                    seen=_one_line(optimizer),
                    expected=_one_line(held.optimizer_spec),
                    fix="Give every worker the same optimizer and hyper-parameters.",
                )

    def _compare(self, shard: Shard, expected: Shard) -> None:
        if expected.server_id != self._server_id or shard.epoch != expected.epoch:
            raise WrongEpoch(
                f"shard {shard.shard_id} is mapped in another way",
                seen=f"epoch {shard.epoch} at server {self._server_id}",
                expected=f"epoch {expected.epoch} at server {expected.server_id}",
                fix="Fetch the shard map and retry.",
            )
        if shard.dtype != expected.dtype:
            raise DtypeMismatch(
                f"shard {shard.shard_id} has another dtype",
                seen=shard.dtype,
                expected=expected.dtype,
            )
        if shard.group != expected.group or list(shard.blocks) != list(expected.blocks):
            raise ShapeMismatch(
                f"shard {shard.shard_id} is cut in another way",
                seen=f"{len(shard.blocks)} blocks in group {shard.group}",
                expected=f"the {len(expected.blocks)} blocks of the job's shard map"
                f" in group {expected.group}",
                fix="Fetch the shard map and create from it.",
            )

    async def add(self, job: str, shard: LiveShard) -> bool:
        """Add a shard unless there is one; whether it was added."""
        held = self._shards.setdefault(job, {})
        if shard.spec.shard_id in held:
            return False
        held[shard.spec.shard_id] = shard
        async with self._changed:
            self._changed.notify_all()
        return True

    def drop(self, job: str) -> int:
        """Forget all shards of a job; how many there were."""
        num_dropped = len(self._shards.pop(job, {}))
        log.info("shards_dropped", job=job, num_shards=num_dropped)
        return num_dropped

    def shards(self, job: str = "") -> Iterator[tuple[str, LiveShard]]:
        """Job and shard, of one job or of all."""
        for name in sorted(self._shards):
            if job in ("", name):
                for shard_id in sorted(self._shards[name]):
                    yield name, self._shards[name][shard_id]

    def _explain(self, job: str, shard_id: int, record: ShardMap | None) -> ShoalError:
        for shard in record.shards if record else ():
            if shard.shard_id == shard_id and shard.server_id == self._server_id:
                return ShardNotReady(
                    f"shard {shard_id} of job {job} has no values yet",
                    expected="a worker that creates it",
                )
            if shard.shard_id == shard_id:
                return WrongEpoch(
                    f"shard {shard_id} of job {job} is not here",
                    seen=f"server {self._server_id}",
                    expected=f"server {shard.server_id}, epoch {shard.epoch}",
                    fix="Fetch the shard map and retry.",
                )
        return UnknownShard(
            f"there is no shard {shard_id} in job {job}",
            seen=f"shard {shard_id}",
            expected=f"one of {len(record.shards)} shards" if record else "a job with a shard map",
            fix="Fetch the shard map.",
        )

    async def _read_map(self, job: str) -> ShardMap | None:
        found = await self._store.get(keys.shard_map(job))
        if found is None:
            return None
        try:
            return ShardMap.FromString(found.value)
        except DecodeError as error:
            raise InternalError(
                f"the shard map of job {job} in etcd does not parse", seen=repr(error)
            ) from error


def _one_line(spec: OptimizerSpec) -> str:
    return " ".join(str(spec).split())
