"""Conversion of the WeightSeries service's messages to and from the core's types."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from shoal_proto.errors import (
    InvalidSpec,
    MalformedMessage,
    Overloaded,
    PublicationAbandoned,
    SeriesHeld,
    ShoalError,
    StaleEpoch,
    Unavailable,
    VersionGone,
)
from shoal_proto.incarnation import public_id
from shoal_proto.names import SERIES_RULE, is_name, is_series
from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.publications.limits import MAX_WORLD
from shoal_server.core.publications.protocol import (
    PublicationPart,
    PublicationRefusal,
    RequestRefused,
)
from shoal_server.core.publications.readers import Reader, ReaderReport
from shoal_server.core.publications.records import (
    DEFAULT_COPIES,
    DEFAULT_KEEP,
    Publisher,
)
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.etcd.records import series as records

MAX_METADATA_BYTES = 4096

_ERRORS: Mapping[PublicationRefusal, tuple[type[ShoalError], str]] = {
    PublicationRefusal.SERIES_HELD: (
        SeriesHeld,
        "Publish under another name, or wait until that publisher has ended.",
    ),
    PublicationRefusal.STALE_EPOCH: (
        StaleEpoch,
        "Stop publishing: another process has taken over.",
    ),
    PublicationRefusal.LATER_EPOCH: (
        Unavailable,
        "Begin the publication again: another coordinator may lead.",
    ),
    PublicationRefusal.ABANDONED: (
        PublicationAbandoned,
        "Publish again; earlier versions are untouched.",
    ),
    PublicationRefusal.GONE: (
        VersionGone,
        "`shoal weights list` shows the versions that exist.",
    ),
    PublicationRefusal.OVERLOADED: (
        Overloaded,
        "Try again once a reader has released a version or a pin is removed, or publish with a"
        " larger keep=.",
    ),
    PublicationRefusal.INVALID: (InvalidSpec, ""),
}


def error_of(refused: RequestRefused) -> ShoalError:
    """Return the refused caller's error."""
    kind, fix = _ERRORS[refused.refusal]
    return kind(refused.what, seen=refused.seen, expected=refused.expected, fix=fix)


def checked_series(name: str) -> str:
    """Return the name. Raises InvalidSpec if it is not valid."""
    if not is_series(name):
        raise InvalidSpec("bad name of a series", seen=repr(name), expected=SERIES_RULE)
    return name


def job_of(series: str) -> str:
    return series.partition("/")[0]


def publisher_of(series: str, message: pb.Publisher) -> Publisher:
    """Return the publisher in a message. Raises InvalidSpec, MalformedMessage."""
    if not message.HasField("token"):
        if not message.incarnation:
            raise MalformedMessage(
                "a publication without a publisher",
                seen="neither a token nor an incarnation",
                expected="a member's token, or the incarnation of a plain script's process",
            )
        return Publisher(script=public_id(message.incarnation))
    token = message.token
    if token.job != job_of(series):
        raise InvalidSpec(
            f"series {series} does not belong to the publisher's job",
            seen=f"a member of job {token.job!r}",
            expected=f"a member of job {job_of(series)!r}",
        )
    if not token.generation:
        raise MalformedMessage(
            "a member publishes before it is part of a generation",
            seen="generation 0",
            expected="the generation that it trains in",
        )
    return Publisher(generation=token.generation)


def check_rank(rank: int, world: int) -> None:
    if not rank < world <= MAX_WORLD:
        raise InvalidSpec(
            "bad rank of a publisher",
            seen=f"rank {rank} of {world}",
            expected=f"a rank below the number of ranks, which is at most {MAX_WORLD}",
        )


def parts_from_pb(request: pb.ContributePartRequest) -> list[PublicationPart]:
    """Return the part of the sending rank, then one for each table segment of a cut, if there are
    any. Raises InvalidSpec, MalformedMessage."""
    own_part = _own_part(request)
    if not request.cut_parts:
        return [own_part]
    if request.world != 1 or not request.tables_cut or len(request.cut_parts) >= MAX_WORLD:
        raise MalformedMessage(
            "bad segments of a cut",
            seen=f"{len(request.cut_parts)} segments from rank {request.rank} of {request.world}",
            expected=f"fewer than {MAX_WORLD}, and the cut's position, from the only rank",
        )
    world, cut = 1 + len(request.cut_parts), request.tables_cut
    parts = [replace(own_part, world=world, tables_cut=cut)]
    for rank, each in enumerate(request.cut_parts, 1):
        layout = each.layout.SerializeToString(deterministic=True)
        parts.append(
            replace(
                parts[0],
                rank=rank,
                segment=records.segment_from_pb(each.segment),
                layout=layout,
                layout_key=hashlib.sha256(layout).digest(),
            )
        )
    return parts


def _own_part(request: pb.ContributePartRequest) -> PublicationPart:
    check_rank(request.rank, request.world)
    segment = request.segment
    if not request.publication or not segment.digest or not segment.holders:
        raise MalformedMessage(
            "an incomplete part of a publication",
            seen=f"publication {request.publication}, a segment of digest"
            f" {segment.digest.hex()[:12]!r} on {len(segment.holders)} servers",
            expected="a publication number of 1 or more, and a segment that servers hold",
        )
    size = sum(len(key) + len(value) for key, value in request.metadata.items())
    if size > MAX_METADATA_BYTES:
        raise InvalidSpec(
            "the metadata of a version is too large",
            seen=f"{size} characters",
            expected=f"at most {MAX_METADATA_BYTES} in all",
        )
    layout = request.layout.SerializeToString(deterministic=True)
    return PublicationPart(
        rank=request.rank,
        world=request.world,
        segment=records.segment_from_pb(segment),
        layout=layout,
        layout_key=hashlib.sha256(layout).digest(),
        step=request.step,
        metadata=dict(request.metadata),
    )


def options_from_pb(options: pb.SeriesOptions) -> tuple[int, int]:
    """Return the number of versions to keep, and of copies; defaults for 0."""
    return options.keep or DEFAULT_KEEP, options.copies or DEFAULT_COPIES


def report_from_pb(request: pb.ReaderReport) -> ReaderReport:
    """Return the report in a message. Raises InvalidSpec for a bad reader id."""
    if not is_name(request.reader):
        raise InvalidSpec(
            "bad id of a reader", seen=repr(request.reader), expected="a name unique to its process"
        )
    return ReaderReport(
        reader=request.reader,
        leased=tuple(request.leased),
        installed=request.installed,
        installed_digest=request.installed_digest,
        serves_at=request.serves_at,
        is_leaving=request.leaving,
        fetch_s=request.fetch_s,
        fetch_bytes=request.fetch_bytes,
        sequence=request.sequence,
    )


def view_of(series: PublishedSeries, servers: Mapping[str, str]) -> pb.SeriesView:
    """View of the series without its readers. `servers`: addresses by id."""
    head, versions = series.head, series.versions
    holders = {h for v in versions.values() for s in v.segments for h in s.holders}
    present = sorted(holders & servers.keys())
    return pb.SeriesView(
        series=series.name,
        epoch=head.epoch,
        head=head.number,
        versions=(records.version_to_pb(versions[number]) for number in head.kept),
        options=pb.SeriesOptions(keep=head.keep, copies=head.copies),
        servers=(pb.StoreServer(id=each, address=servers[each]) for each in present),
        lost=head.lost,
        publisher=str(head.publisher) if head.epoch else "",
    )


def readers_of(series: PublishedSeries, now_s: float) -> list[pb.ReaderView]:
    """Readers of a series, by id."""
    known = sorted(series.readers.known.items())
    return [_reader_view(series, name, reader, now_s) for name, reader in known]


def _reader_view(series: PublishedSeries, name: str, reader: Reader, now_s: float) -> pb.ReaderView:
    report = reader.report
    return pb.ReaderView(
        id=name,
        installed=report.installed,
        installed_digest=report.installed_digest,
        differs=series.differs(reader),
        leased=sorted(number for number, until_s in reader.leases.items() if until_s > now_s),
        seen_unix_s=reader.seen_s,
        serves_at=report.serves_at,
        fetch_s=report.fetch_s,
        fetch_bytes=report.fetch_bytes,
    )
