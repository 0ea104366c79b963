"""Giving lost shards up, because an operator says so."""

import time
from collections.abc import Callable, Iterable

from shoal_proto.errors import InvalidSpec, NothingLost, UnknownJob, UnknownShard
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1.shards_pb2 import AcceptLossReply, AcceptLossRequest, GivenUpShard
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import assignments as records

MAX_BY_LENGTH = 200


class LossAcceptance:
    """`require_leading` raises NotLeader."""

    def __init__(
        self, store: KeyValueStore, loss_log: LossLog, require_leading: Callable[[], None]
    ) -> None:
        self._store = store
        self._losses = loss_log
        self._require_leading = require_leading

    async def accept(self, request: AcceptLossRequest) -> AcceptLossReply:
        """Have these lost shards begin anew, or all that are lost. Those that are not lost keep
        what they have; those that were given up before are told once more.

        Raises UnknownJob, UnknownShard, NothingLost, NotLeader, and what the store raises.
        """
        self._require_leading()
        job, by = request.job, request.by[:MAX_BY_LENGTH] or "somebody"
        if not is_name(job):
            raise InvalidSpec("bad name of a job", seen=repr(job[:128]), expected=NAME_RULE)
        wanted = frozenset(request.shard_ids)
        now_unix_s = time.time()
        given_up: list[ShardAssignment] = []
        while True:
            current, stored = await self._read(job)
            chosen = _chosen(current, wanted)
            lost = [shard for shard in chosen if shard.content is ShardContent.LOST]
            if request.dry_run or not lost:
                break
            size = records.SHARDS_A_TRANSACTION
            for batch in (lost[start : start + size] for start in range(0, len(lost), size)):
                targets = [losses.given_up(shard, by, now_unix_s) for shard in batch]
                before = [stored[shard.shard_id] for shard in batch]
                is_done, _ = await records.change(self._store, before, targets)
                given_up += batch if is_done else []
        if given_up:
            self._losses.accepted(job, given_up, by)
        return _reply(chosen, lost if request.dry_run else given_up)

    async def _read(self, job: str) -> tuple[JobAssignments, dict[int, records.StoredShard]]:
        listed = await self._store.range(keys.assignments(job))
        current = records.parse_all(job, listed.items)
        if current is None:
            raise await self._without_shards(job)
        prefix = keys.assignments_of_run(job, current.run)
        stored = [records.parse_shard(i) for i in listed.items if i.key.startswith(prefix)]
        return current, {shard.assignment.shard_id: shard for shard in stored}

    async def _without_shards(self, job: str) -> UnknownJob | NothingLost:
        if await self._store.get(keys.job_state(job)) is None:
            return UnknownJob(f"there is no job {job!r}", fix="`shoal status` lists the jobs.")
        return NothingLost(
            f"job {job} has lost no shard",
            seen="no shards on parameter servers",
            expected="a shard that is lost",
        )


def _chosen(current: JobAssignments, wanted: frozenset[int]) -> list[ShardAssignment]:
    """Those of the wanted shards, or of all, that are lost or were given up: none without any that
    is lost. Raises UnknownShard and NothingLost for what cannot be given up."""
    missing = wanted - {shard.shard_id for shard in current.shards}
    if missing:
        raise UnknownShard(
            f"there is no shard {min(missing)} in job {current.job}",
            seen=f"shard {min(missing)}",
            expected=f"one of {len(current.shards)} shards",
            fix="`shoal status` shows which are lost.",
        )
    lost = losses.lost(current)
    for shard in current.shards:
        if shard.shard_id in wanted and shard not in lost and shard.accepted_loss is None:
            raise NothingLost(
                f"shard {shard.shard_id} of job {current.job} is not lost",
                seen=shard.content.value,
                expected=losses.shards_in_short(lost) or "a shard that is lost; none of it is",
            )
    if wanted:
        return [shard for shard in current.shards if shard.shard_id in wanted]
    chosen = lost or [shard for shard in current.shards if shard.accepted_loss is not None]
    if not chosen:
        raise NothingLost(
            f"job {current.job} has lost no shard",
            seen=f"{len(current.shards)} shards, none of them lost",
            expected="a shard that is lost",
            fix=f"`shoal status --job {current.job}` shows its shards.",
        )
    return chosen


def _reply(
    shards: Iterable[ShardAssignment], by_this_call: Iterable[ShardAssignment]
) -> AcceptLossReply:
    now = {shard.shard_id for shard in by_this_call}
    return AcceptLossReply(shards=[_told(shard, shard.shard_id not in now) for shard in shards])


def _told(shard: ShardAssignment, before: bool) -> GivenUpShard:
    accepted = None if shard.content is ShardContent.LOST else shard.accepted_loss
    loss = accepted.loss if accepted is not None else shard.loss
    return GivenUpShard(
        shard_id=shard.shard_id,
        version=loss.version if loss is not None else 0,
        by=accepted.by if accepted is not None else "",
        accepted_unix_s=accepted.accepted_unix_s if accepted is not None else 0.0,
        before=before,
        lost_unix_s=loss.lost_unix_s if loss is not None else 0.0,
        servers=loss.servers if loss is not None else (),
    )
