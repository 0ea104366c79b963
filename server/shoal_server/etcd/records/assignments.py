"""The record of who holds a job's shards, in etcd: read whole, replaced by compare-and-swap."""

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shoal_proto.errors import InternalError, RetryError
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.shards.assignments import (
    Holder,
    JobAssignments,
    ShardAssignment,
    ShardContent,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import Get, KeyValue, KeyValueStore, Put, Revision, unchanged_since
from shoal_server.etcd.mirror import Item

Change = Callable[[JobAssignments], JobAssignments]

_CONTENTS = {
    ShardContent.NONE: pb.ShardContent.SHARD_CONTENT_NONE,
    ShardContent.LOADING: pb.ShardContent.SHARD_CONTENT_LOADING,
    ShardContent.PRESENT: pb.ShardContent.SHARD_CONTENT_PRESENT,
    ShardContent.LOST: pb.ShardContent.SHARD_CONTENT_LOST,
}
_CONTENT_OF = {number: content for content, number in _CONTENTS.items()}


@dataclass(frozen=True, slots=True)
class StoredAssignments:
    """A record and the revision it was written at."""

    assignments: JobAssignments
    revision: Revision


async def read(store: KeyValueStore, job: str) -> StoredAssignments | None:
    found = await store.get(keys.assignments(job))
    return None if found is None else parse(found)


async def change(
    store: KeyValueStore, stored: StoredAssignments, wanted: Change
) -> StoredAssignments | None:
    """Replace the record by `wanted` of it, from `stored` on if that is still the newest.

    `wanted` is called again on each record that somebody else wrote meanwhile, and gives back its
    argument where nothing is to be changed (any more). The record that then stands; None if it
    is gone. Raises what the store raises; then the change may have been made.
    """
    current: StoredAssignments | None = stored
    while current is not None:
        target = wanted(current.assignments)
        if target == current.assignments:
            return current
        key = keys.assignments(target.job)
        try:
            result = await store.transact(
                [unchanged_since(key, current.revision)],
                [Put(key, encode(target))],
                [Get(key)],
            )
        except RetryError as error:
            if error.details.get("outcome") != "unknown":
                raise
            current = await read(store, target.job)
            continue
        if result.succeeded:
            return StoredAssignments(target, result.revision)
        current = parse(result.reads[0][0]) if result.reads[0] else None
    return None


def encode(assignments: JobAssignments) -> bytes:
    message = pb.ShardHoldings(job=assignments.job, copies=assignments.copies, run=assignments.run)
    for h in assignments.shards:
        shard = message.shards.add(
            shard_id=h.shard_id,
            epoch=h.epoch,
            primary=_holder(h.primary),
            on_disk=h.on_disk,
            content=_CONTENTS[h.content],
        )
        shard.backups.extend(_holder(b) for b in h.backups)
        if h.joining is not None:
            shard.joining.CopyFrom(_holder(h.joining))
        if h.successor is not None:
            shard.successor.CopyFrom(_holder(h.successor))
    return message.SerializeToString(deterministic=True)


def parse(entry: Item | KeyValue) -> StoredAssignments:
    """Raises InternalError for bytes that are no such record."""
    try:
        message = pb.ShardHoldings.FromString(entry.value)
    except DecodeError as error:
        raise InternalError(
            f"the record of shard holders at {entry.key} does not parse", seen=repr(error)
        ) from error
    job = entry.key.removeprefix(keys.ASSIGNMENTS)
    if message.job != job:
        raise InternalError(
            f"the record of shard holders at {entry.key} is not that job's",
            seen=repr(message.job[:128]),
            expected=repr(job),
        )
    shards = tuple(
        ShardAssignment(
            shard_id=s.shard_id,
            epoch=s.epoch,
            primary=_from(s.primary),
            backups=tuple(_from(b) for b in s.backups),
            joining=_from(s.joining) if s.HasField("joining") else None,
            successor=_from(s.successor) if s.HasField("successor") else None,
            on_disk=s.on_disk,
            content=_content(s),
        )
        for s in message.shards
    )
    stored = JobAssignments(job=message.job, copies=message.copies, shards=shards, run=message.run)
    return StoredAssignments(stored, entry.mod_revision)


def _content(shard: pb.ShardHolding) -> ShardContent:
    """Of a record of a release that did not say: what had another primary before was there."""
    unsaid = ShardContent.PRESENT if shard.epoch > 1 else ShardContent.NONE
    return _CONTENT_OF.get(shard.content, unsaid)


def _holder(holder: Holder) -> pb.Holder:
    return pb.Holder(server_id=holder.server_id, incarnation=holder.incarnation)


def _from(message: pb.Holder) -> Holder:
    return Holder(message.server_id, message.incarnation)
