"""Conversion of the steps and shards of a cut to messages, and back."""

from collections.abc import Iterable, Mapping
from functools import cache

from shoal_proto.v1.snapshots_pb2 import BegunStep, BegunSteps, ShardFile, ShardStamp
from shoal_server.core.shards.steps import Begun, Shards, StepId, from_bits, to_bits
from shoal_server.snapshots.manifest import ManifestEntry


def encode_begun(begun: Begun) -> list[BegunSteps]:
    by_session: dict[str, BegunSteps] = {}
    # Most steps touch the same shards.
    encode = cache(to_bits)
    for step, shards in begun.items():
        session = by_session.setdefault(step.session, BegunSteps(session=step.session))
        session.steps.append(
            BegunStep(
                sequence=step.sequence,
                touches_all=shards is None,
                shard_bits=b"" if shards is None else encode(shards),
            )
        )
    return list(by_session.values())


def decode_begun(messages: Iterable[BegunSteps]) -> dict[StepId, Shards]:
    """Decode the steps that `encode_begun` encoded, with their shards; None: every dense shard."""
    return {
        StepId(session.session, step.sequence): None
        if step.touches_all
        else from_bits(step.shard_bits)
        for session in messages
        for step in session.steps
    }


def encode_entry(entry: ManifestEntry) -> ShardFile:
    stamp = ShardStamp(shard_id=entry.shard_id, epoch=entry.epoch, version=entry.version)
    return ShardFile(
        shard=stamp,
        kind=entry.kind,
        file=entry.file,
        num_bytes=entry.num_bytes,
        sha256=entry.sha256,
    )


def decode_entry(file: ShardFile) -> ManifestEntry:
    """Decode what `encode_entry` encoded. The values are not validated."""
    return ManifestEntry(
        shard_id=file.shard.shard_id,
        epoch=file.shard.epoch,
        version=file.shard.version,
        kind=file.kind,
        file=file.file,
        num_bytes=file.num_bytes,
        sha256=file.sha256,
    )


def newest(begun: Mapping[StepId, Shards]) -> dict[str, int]:
    """Sequence number of each session's newest step."""
    found: dict[str, int] = {}
    for step in begun:
        found[step.session] = max(step.sequence, found.get(step.session, 0))
    return found
