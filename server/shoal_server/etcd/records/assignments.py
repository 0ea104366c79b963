"""Shard assignments in etcd: one record per shard, replaced by compare-and-swap.

A job's head is written after the records of its shards, in the transaction that decides the
placement. Until then the records have no effect. The next placement deletes those without a head.
Keys contain the placement's random id, so records of two placements are never confused.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from shoal_proto.errors import InternalError, RetryError, ShoalError
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    AcceptedLoss,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    ShardLoss,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    Get,
    Keyspace,
    KeyValue,
    Operation,
    Put,
    Revision,
    TransactionResult,
    created_at,
    unchanged_since,
)
from shoal_server.etcd.mirror import MirroredKey
from shoal_server.etcd.repeat import is_outcome_unknown, transact_until_known
from shoal_server.serving.tasks import gather_bounded

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=Message)
Change = Callable[[ShardAssignment], ShardAssignment]

FORMAT = 1
SHARDS_A_TRANSACTION = 100
"""etcd's limits are 128 operations, 128 comparisons, and 1.5 MiB."""
TRANSACTIONS_AT_ONCE = 4

_CONTENTS = {
    ShardContent.NONE: pb.ShardContent.SHARD_CONTENT_NONE,
    ShardContent.LOADING: pb.ShardContent.SHARD_CONTENT_LOADING,
    ShardContent.PRESENT: pb.ShardContent.SHARD_CONTENT_PRESENT,
    ShardContent.LOST: pb.ShardContent.SHARD_CONTENT_LOST,
}
_CONTENT_OF = {number: content for content, number in _CONTENTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    job: str
    copies: int
    placement_id: str
    kept_placement_id: str
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    job: str
    placement_id: str
    assignment: ShardAssignment
    value: bytes
    """Encoded record, perhaps with fields unknown to this release."""
    revision: Revision

    @property
    def key(self) -> str:
        return keys.shard_assignment(self.job, self.placement_id, self.assignment.shard_id)

    def replaced(self, assignment: ShardAssignment) -> Put:
        return Put(self.key, encode_shard(self.placement_id, assignment, self.value))

    @property
    def is_unchanged(self) -> Compare:
        return unchanged_since(self.key, self.revision)


@dataclass(frozen=True, slots=True)
class StoredAssignments:
    assignments: JobAssignments
    revision: Revision


# --- reading ---


async def read(store: Keyspace, job: str) -> StoredAssignments | None:
    """Read all assignments of a job; None if its shards are not placed. Raises InternalError for a
    missing or unreadable record."""
    listed = await store.range(keys.assignments(job))
    found = parse_all(job, listed.items)
    return None if found is None else StoredAssignments(found, listed.revision)


def parse_all(job: str, items: Collection[KeyValue]) -> JobAssignments | None:
    """Parse all keys below `keys.assignments` of the job. Raises InternalError as `read` does."""
    head_key = keys.assignments_head(job)
    head = next((parse_head(item) for item in items if item.key == head_key), None)
    if head is None:
        return None
    prefix = keys.assignments_of_placement(job, head.placement_id)
    shards = (parse_shard(item).assignment for item in items if item.key.startswith(prefix))
    return assembled(head, {assignment.shard_id: assignment for assignment in shards})


async def jobs(store: Keyspace) -> list[str]:
    found = await store.keys(keys.ASSIGNMENTS)
    names = [key.removeprefix(keys.ASSIGNMENTS) for key in found]
    return [name.removesuffix("/head") for name in names if name.endswith("/head")]


def assembled(head: JobHead, shards: Mapping[int, ShardAssignment]) -> JobAssignments:
    """All assignments of a job. Raises InternalError if a shard is missing."""
    if len(shards) != head.num_shards:
        prefix = keys.assignments_of_placement(head.job, head.placement_id)
        raise InternalError(
            f"not every shard of job {head.job} has a record of its holders that can be read",
            seen=f"{len(shards)} below {prefix}",
            expected=str(head.num_shards),
        )
    in_order = tuple(shards[shard_id] for shard_id in sorted(shards))
    return JobAssignments(
        job=head.job,
        copies=head.copies,
        shards=in_order,
        placement_id=head.placement_id,
        kept_placement_id=head.kept_placement_id,
    )


def parse(entry: MirroredKey | KeyValue) -> JobHead | StoredShard:
    """Parse a record below `keys.ASSIGNMENTS`. Raises InternalError if it does not parse, does not
    match its key, or is of a later format."""
    return parse_head(entry) if entry.key.endswith("/head") else parse_shard(entry)


def parse_head(entry: MirroredKey | KeyValue) -> JobHead:
    """Parse a job's head. Raises what `parse` raises."""
    message = _parsed(pb.JobHoldings, entry)
    expected = keys.assignments_head(message.job)
    if entry.key != expected or not message.run or message.format > FORMAT:
        raise _foreign(entry, message)
    return JobHead(
        job=message.job,
        copies=message.copies,
        placement_id=message.run,
        kept_placement_id=message.job_run,
        num_shards=message.num_shards,
    )


def parse_shard(entry: MirroredKey | KeyValue) -> StoredShard:
    """Parse a shard's record. Raises what `parse` raises."""
    message = _parsed(pb.ShardHolding, entry)
    job = entry.key.removeprefix(keys.ASSIGNMENTS).partition("/")[0]
    expected = keys.shard_assignment(job, message.run, message.shard_id)
    content = _CONTENT_OF.get(message.content)
    if entry.key != expected or not message.run or message.format > FORMAT or content is None:
        raise _foreign(entry, message)
    assignment = ShardAssignment(
        shard_id=message.shard_id,
        epoch=message.epoch,
        primary=_from(message.primary),
        backups=tuple(_from(b) for b in message.backups),
        joining=_from(message.joining) if message.HasField("joining") else None,
        successor=_from(message.successor) if message.HasField("successor") else None,
        on_disk=message.on_disk,
        disk_epoch=message.disk_epoch,
        disk_version=message.disk_version,
        found_version=message.found_version,
        found_foreign=message.found_foreign,
        restored_version=message.restored_version,
        content=content,
        loss=_loss_from(message.loss) if message.HasField("loss") else None,
        accepted_loss=_accepted_from(message.accepted_loss)
        if message.HasField("accepted_loss")
        else None,
    )
    return StoredShard(
        job=job,
        placement_id=message.run,
        assignment=assignment,
        value=entry.value,
        revision=entry.mod_revision,
    )


def encode_head(assignments: JobAssignments) -> bytes:
    return pb.JobHoldings(
        job=assignments.job,
        copies=assignments.copies,
        num_shards=len(assignments.shards),
        run=assignments.placement_id,
        job_run=assignments.kept_placement_id,
        format=FORMAT,
    ).SerializeToString(deterministic=True)


def encode_shard(placement_id: str, assignment: ShardAssignment, before: bytes = b"") -> bytes:
    """Encode a shard's record. Unknown fields of the previous record (`before`) are kept."""
    message = pb.ShardHolding.FromString(before)
    for field in ("backups", "joining", "successor", "loss", "accepted_loss"):
        message.ClearField(field)
    message.run, message.format = placement_id, FORMAT
    message.shard_id, message.epoch = assignment.shard_id, assignment.epoch
    message.primary.CopyFrom(_holder(assignment.primary))
    message.backups.extend(_holder(b) for b in assignment.backups)
    if assignment.joining is not None:
        message.joining.CopyFrom(_holder(assignment.joining))
    if assignment.successor is not None:
        message.successor.CopyFrom(_holder(assignment.successor))
    message.on_disk = assignment.on_disk
    message.disk_epoch, message.disk_version = assignment.disk_epoch, assignment.disk_version
    message.found_version = assignment.found_version
    message.found_foreign = assignment.found_foreign
    message.restored_version = assignment.restored_version
    message.content = _CONTENTS[assignment.content]
    if assignment.loss is not None:
        message.loss.CopyFrom(_loss(assignment.loss))
    if assignment.accepted_loss is not None:
        accepted = assignment.accepted_loss
        message.accepted_loss.CopyFrom(
            pb.AcceptedLoss(
                loss=_loss(accepted.loss),
                by=accepted.by,
                accepted_unix_s=accepted.accepted_unix_s,
                samples_anew=accepted.samples_anew,
            )
        )
    return message.SerializeToString(deterministic=True)


async def read_shards(
    store: Keyspace, job: str, shard_ids: Collection[int]
) -> dict[int, ShardAssignment]:
    """Current assignments of these shards, without those that have no record.

    Empty if the shards are not placed. Raises InternalError for an unreadable record.
    """
    found = await store.get(keys.assignments_head(job))
    if found is None:
        return {}
    placement_id = parse_head(found).placement_id
    gets = [Get(keys.shard_assignment(job, placement_id, shard_id)) for shard_id in shard_ids]
    batches = [
        gets[start : start + SHARDS_A_TRANSACTION]
        for start in range(0, len(gets), SHARDS_A_TRANSACTION)
    ]
    shards = [
        parse_shard(item).assignment
        for batch in batches
        for items in (await store.transact((), batch)).reads
        for item in items
    ]
    return {assignment.shard_id: assignment for assignment in shards}


# --- placing and deleting ---


async def place(
    store: Keyspace,
    assignments: JobAssignments,
    *,
    compares: Sequence[Compare] = (),
    operations: Sequence[Operation] = (),
    otherwise: Sequence[Operation] = (),
) -> TransactionResult:
    """Write a new placement: the shards' records, then the head and `operations` in the transaction
    that decides it.

    Its conditions are `compares`, and that the shards' records still exist. If one fails, nothing
    is placed, the records are deleted, and the result answers `otherwise`. After an error of the
    store, records may remain. After an unknown outcome, the caller reads back.
    """
    assert assignments.placement_id, (
        "records of a placement without an id would be mistaken for another's"
    )
    shards, size = assignments.shards, SHARDS_A_TRANSACTION
    first, *rest = (shards[start : start + size] for start in range(0, len(shards), size))

    async def write(batch: Sequence[ShardAssignment]) -> Compare:
        return await _write(store, assignments, batch)

    # Records of a placement are deleted together: if the first exists at the end, all do.
    still_there = await write(first)
    await gather_bounded(write, rest, TRANSACTIONS_AT_ONCE)
    head = Put(keys.assignments_head(assignments.job), encode_head(assignments))
    decided = await store.transact([still_there, *compares], [head, *operations], otherwise)
    if decided.succeeded:
        await _delete_unfinished(store, assignments, decided.revision)
    else:
        own_records = keys.assignments_of_placement(assignments.job, assignments.placement_id)
        await store.transact([], [Delete(own_records, prefix=True)])
    return decided


def delete_assignments(job: str) -> Delete:
    return Delete(keys.assignments(job), prefix=True)


async def _write(
    store: Keyspace,
    assignments: JobAssignments,
    batch: Sequence[ShardAssignment],
) -> Compare:
    """Write records; return the condition that the first still exists."""
    placement_id = assignments.placement_id
    puts = [
        Put(
            keys.shard_assignment(assignments.job, placement_id, h.shard_id),
            encode_shard(placement_id, h),
        )
        for h in batch
    ]
    # No other process writes these keys: repeating is harmless.
    result = await transact_until_known(store, [], [*puts, Get(puts[0].key)])
    return created_at(puts[0].key, result.reads[0][0].create_revision)


async def _delete_unfinished(store: Keyspace, placed: JobAssignments, decided_at: Revision) -> None:
    prefix = keys.assignments(placed.job)
    still_decided = unchanged_since(keys.assignments_head(placed.job), decided_at)
    try:
        found = [key.removeprefix(prefix) for key in await store.keys(prefix)]
        placement_ids = {key.partition("/")[0] for key in found if "/" in key}
        for placement_id in placement_ids - {placed.placement_id}:
            gone = Delete(keys.assignments_of_placement(placed.job, placement_id), prefix=True)
            await store.transact([still_decided], [gone])
    except RetryError as error:
        # The records do no harm, and the next placement deletes them.
        log.warning("unfinished_placements_not_deleted", job=placed.job, reason=str(error))


# --- changing ---


async def change(
    store: Keyspace,
    shards: Sequence[StoredShard],
    targets: Sequence[ShardAssignment],
    operations: Sequence[Operation] = (),
) -> tuple[bool, list[KeyValue | MirroredKey]]:
    """Replace records, at most SHARDS_A_TRANSACTION, in one transaction, unless one of them was
    written since it was read. The transaction includes `operations`, which must not read.

    Returns True if they were replaced, and the current records that exist. After an unknown outcome
    it returns False and the current records, once the write can take no effect any more. After an
    error of the store, nothing was changed, unless `details["outcome"]` is "unknown": a change is
    possible until `settled` returns.
    """
    puts = [stored.replaced(target) for stored, target in zip(shards, targets, strict=True)]
    gets = [Get(stored.key) for stored in shards]
    try:
        result = await store.transact([s.is_unchanged for s in shards], [*puts, *operations], gets)
    except RetryError as error:
        if not is_outcome_unknown(error):
            raise
        return False, await settled(store, shards)
    if result.succeeded:
        return True, [MirroredKey(put.key, put.value, result.revision) for put in puts]
    return False, [item for found in result.reads for item in found]


async def settled(store: Keyspace, shards: Iterable[StoredShard]) -> list[KeyValue | MirroredKey]:
    """Return the existing records once a write of unknown outcome is over. After an error of the
    store, the outcome is still unknown."""
    try:
        return [item for stored in shards for item in await _settled(store, stored)]
    except ShoalError as error:
        error.details["outcome"] = "unknown"
        raise


async def _settled(store: Keyspace, stored: StoredShard) -> Sequence[KeyValue]:
    """Write the record again, unchanged. A late write then fails, since it compares the earlier
    revision."""
    result = await transact_until_known(
        store,
        [stored.is_unchanged],
        [stored.replaced(stored.assignment), Get(stored.key)],
        [Get(stored.key)],
    )
    return result.reads[0]


def _parsed(kind: type[M], entry: MirroredKey | KeyValue) -> M:
    try:
        return kind.FromString(entry.value)
    except DecodeError as error:
        raise InternalError(
            f"the record of shard holders at {entry.key} does not parse", seen=repr(error)
        ) from error


def _foreign(
    entry: MirroredKey | KeyValue, message: pb.JobHoldings | pb.ShardHolding
) -> InternalError:
    return InternalError(
        f"the record of shard holders at {entry.key} does not match its key, or is of a "
        "later release",
        seen=" ".join(str(message).split())[:200],
        expected=f"the job, run and shard of the key, in format {FORMAT}",
    )


def _holder(holder: Holder) -> pb.Holder:
    return pb.Holder(server_id=holder.server_id, incarnation=holder.incarnation)


def _from(message: pb.Holder) -> Holder:
    return Holder(message.server_id, message.incarnation)


def _loss(loss: ShardLoss) -> pb.ShardLoss:
    return pb.ShardLoss(
        version=loss.version,
        lost_unix_s=loss.lost_unix_s,
        servers=loss.servers,
        snapshot=loss.snapshot,
    )


def _loss_from(message: pb.ShardLoss) -> ShardLoss:
    return ShardLoss(
        version=message.version,
        lost_unix_s=message.lost_unix_s,
        servers=tuple(message.servers),
        snapshot=message.snapshot,
    )


def _accepted_from(message: pb.AcceptedLoss) -> AcceptedLoss:
    return AcceptedLoss(
        loss=_loss_from(message.loss),
        by=message.by,
        accepted_unix_s=message.accepted_unix_s,
        samples_anew=message.samples_anew,
    )
