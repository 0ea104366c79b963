"""Conversion of the steps and shards of a cut to messages, and back."""

from collections.abc import Iterable, Mapping
from functools import cache

from shoal_proto.v1.snapshots_pb2 import BegunStep, BegunSteps, ShardFile, ShardStamp
from shoal_server.core.shards.steps import Begun, Shards, StepId, from_bits, to_bits
from shoal_server.snapshots.manifest import ManifestEntry


def of_begun(begun: Begun) -> list[BegunSteps]:
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


def to_begun(messages: Iterable[BegunSteps]) -> dict[StepId, Shards]:
    """Decode the steps that `of_begun` encoded, with their shards; None: every dense shard."""
    return {
        StepId(session.session, step.sequence): None
        if step.touches_all
        else from_bits(step.shard_bits)
        for session in messages
        for step in session.steps
    }


def file_of(part: ManifestEntry) -> ShardFile:
    """Return an entry of a manifest as a message."""
    stamp = ShardStamp(shard_id=part.shard_id, epoch=part.epoch, version=part.version)
    return ShardFile(
        shard=stamp,
        kind=part.kind,
        file=part.file,
        num_bytes=part.num_bytes,
        sha256=part.sha256,
    )


def to_part(file: ShardFile) -> ManifestEntry:
    """Return the manifest's entry for a file in a message, not checked."""
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
