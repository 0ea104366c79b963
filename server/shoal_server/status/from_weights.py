"""Conversion of the core's series of published weights to views."""

from shoal_server.core.publications.readers import Reader
from shoal_server.core.publications.records import PublishedVersion
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.status.views import (
    PublishedSeriesView,
    PublishedVersionView,
    WeightReaderView,
)

MAX_READERS = 200
"""Maximum number of readers shown of one series; readers whose bytes differ come first."""


def series_view(series: PublishedSeries) -> PublishedSeriesView:
    """View of a series."""
    readers = [_reader_view(series, name, each) for name, each in series.readers.known.items()]
    readers.sort(key=lambda each: (not each.differs, each.reader_id))
    return PublishedSeriesView(
        series=series.name,
        version=series.head.number,
        publisher=str(series.head.publisher),
        versions=tuple(_version_view(series.versions[number]) for number in series.head.kept),
        readers=tuple(readers[:MAX_READERS]),
        num_readers=len(readers),
        num_differing=sum(each.differs for each in readers),
        lost=series.head.lost,
    )


def _version_view(version: PublishedVersion) -> PublishedVersionView:
    return PublishedVersionView(
        version=version.number,
        step=version.step,
        created_unix_s=version.created_unix_s,
        num_bytes=version.num_bytes,
        num_copies=min((len(each.holders) for each in version.segments), default=0),
        digest=version.digest.hex(),
        pinned=version.is_pinned,
        durable=version.is_durable,
        rolled_back_to=version.rolled_back_to,
    )


def _reader_view(series: PublishedSeries, name: str, reader: Reader) -> WeightReaderView:
    report = reader.report
    return WeightReaderView(
        reader_id=name,
        version=report.installed,
        digest=report.installed_digest.hex(),
        differs=series.differs(reader),
        lag_versions=max(series.head.number - report.installed, 0) if report.installed else 0,
        seen_unix_s=reader.seen_s,
        fetch_s=report.fetch_s,
        fetch_bytes=report.fetch_bytes,
    )
