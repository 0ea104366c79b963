"""Series of published weights in etcd: a head, and a record of each version that it names.

The leading coordinator writes them. A parameter server keeps the segments that name it as a holder,
and refuses segments of an epoch before the head's.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shoal_proto.errors import InternalError
from shoal_proto.names import is_series
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.publications.records import (
    DEFAULT_COPIES,
    DEFAULT_KEEP,
    PublishedSegment,
    PublishedVersion,
    Publisher,
    SeriesHead,
    StoredSeries,
)
from shoal_server.etcd import keys

M = TypeVar("M", bound=Message)

FORMAT = 1


def split_name(name: str) -> tuple[str, str] | None:
    """Split a key without the prefix `keys.SERIES` into the series and the rest, such as `head` or
    `versions/000000000000007`. None without a valid name of a series, or without a rest."""
    job, _, rest = name.partition("/")
    short, _, rest = rest.partition("/")
    series = f"{job}/{short}"
    return (series, rest) if is_series(series) and rest else None


def encode_head(head: SeriesHead) -> bytes:
    return pb.SeriesHead(
        format=FORMAT,
        epoch=head.epoch,
        generation=head.publisher.generation,
        script=head.publisher.script,
        number=head.number,
        publication=head.publication,
        kept=head.kept,
        options=pb.SeriesOptions(keep=head.keep, copies=head.copies),
        digests=head.digests,
        lost=head.lost,
        num_writes=head.num_writes,
        num_lost=head.num_lost,
    ).SerializeToString(deterministic=True)


def parse_head(series: str, value: bytes) -> SeriesHead:
    """Parse a head. Raises InternalError if it does not parse, or is of a later release."""
    found = _parsed(pb.SeriesHead, series, value)
    if not 0 < found.format <= FORMAT:
        raise _unreadable(series, f"format {found.format}", f"format 1 to {FORMAT}")
    kept = tuple(found.kept)
    if list(kept) != sorted(set(kept)) or (kept and not 0 < kept[0] <= kept[-1] <= found.number):
        raise _unreadable(series, f"versions {kept[:8]} up to {found.number}", "rising numbers")
    return SeriesHead(
        epoch=found.epoch,
        publisher=Publisher(found.generation, found.script),
        number=found.number,
        publication=found.publication,
        kept=kept,
        keep=found.options.keep or DEFAULT_KEEP,
        copies=found.options.copies or DEFAULT_COPIES,
        digests=dict(found.digests),
        lost=tuple(found.lost),
        num_writes=found.num_writes,
        num_lost=found.num_lost,
    )


def encode_version(version: PublishedVersion) -> bytes:
    return version_to_pb(version).SerializeToString(deterministic=True)


def parse_version(series: str, value: bytes) -> PublishedVersion:
    """Parse a version. Raises InternalError if it does not parse, or its digest is wrong."""
    found = _parsed(pb.VersionRecord, series, value)
    version = version_from_pb(found)
    if found.digest != version.digest:
        raise _unreadable(series, "a digest of other segments", "the digest of its segments")
    return version


def version_to_pb(version: PublishedVersion) -> pb.VersionRecord:
    """A version as stored, and as sent to readers."""
    return pb.VersionRecord(
        number=version.number,
        epoch=version.epoch,
        step=version.step,
        layout_digest=version.layout_digest,
        segments=map(segment_to_pb, version.segments),
        digest=version.digest,
        created_unix_s=version.created_unix_s,
        metadata=version.metadata,
        rolled_back_to=version.rolled_back_to,
        pinned=version.is_pinned,
        durable=version.is_durable,
        tables_cut=version.tables_cut,
        publication=version.publication,
    )


def version_from_pb(found: pb.VersionRecord) -> PublishedVersion:
    """The version in a message. Its digest is not compared."""
    return PublishedVersion(
        number=found.number,
        epoch=found.epoch,
        publication=found.publication,
        step=found.step,
        layout_digest=found.layout_digest,
        segments=tuple(map(segment_from_pb, found.segments)),
        created_unix_s=found.created_unix_s,
        metadata=dict(found.metadata),
        rolled_back_to=found.rolled_back_to,
        is_pinned=found.pinned,
        is_durable=found.durable,
        tables_cut=found.tables_cut,
    )


def segment_to_pb(segment: PublishedSegment) -> pb.Segment:
    return pb.Segment(digest=segment.digest, num_bytes=segment.num_bytes, holders=segment.holders)


def segment_from_pb(segment: pb.Segment) -> PublishedSegment:
    return PublishedSegment(
        digest=segment.digest, num_bytes=segment.num_bytes, holders=tuple(segment.holders)
    )


def parse_series(series: str, values: Mapping[str, bytes]) -> StoredSeries | None:
    """Parse a series; None if it has no head. `values`: records by key, perhaps of other series
    too. Raises InternalError for a record that is unreadable, or missing although the head names
    it."""
    value = values.get(keys.series_head(series))
    if value is None:
        return None
    head = parse_head(series, value)
    versions = {}
    for number in head.kept:
        found = values.get(keys.series_version(series, number))
        if found is None:
            raise _unreadable(series, f"no version {number}", "each version that the head names")
        versions[number] = parse_version(series, found)
    return StoredSeries(head=head, versions=versions)


def names_in(found: Iterable[str]) -> list[str]:
    """Names of the series of these keys, each once."""
    split = (split_name(key.removeprefix(keys.SERIES)) for key in found)
    return list(dict.fromkeys(each[0] for each in split if each is not None))


def _parsed(kind: type[M], series: str, value: bytes) -> M:
    try:
        return kind.FromString(value)
    except DecodeError as error:
        raise _unreadable(series, repr(error), f"a {kind.DESCRIPTOR.name} message") from error


def _unreadable(series: str, seen: str, expected: str) -> InternalError:
    return InternalError(
        f"a record of series {series} in etcd does not parse", seen=seen, expected=expected
    )
