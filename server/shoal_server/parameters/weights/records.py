"""Mirror of the series' records in etcd, which name the segments that servers are to hold."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal_server.core.publications.records import PublishedSegment, PublishedVersion, SeriesHead
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror
from shoal_server.etcd.records.series import parse_head, parse_version, split_name
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.store import Position
from shoal_server.parameters.weights.upkeep import WeightUpkeep

HEAD = "head"

Record = SeriesHead | PublishedVersion


class SeriesRecords:
    """Records of series, from a watch; kept while etcd is unreachable. Lives on the event loop."""

    def __init__(
        self, store: KeyValueStore, holdings: WeightHoldings, upkeep: WeightUpkeep
    ) -> None:
        """Follow the records and notify `holdings` and `upkeep` of each change."""
        self._store = store
        self._holdings = holdings
        self._upkeep = upkeep
        self._records: dict[str, dict[str, Record]] = {}
        self._changed: set[str] = set()
        self._mirror: PrefixMirror[Record] = PrefixMirror(
            store,
            keys.SERIES,
            _parsed,
            on_put=lambda name, record, old: self._put(name, record),
            on_delete=lambda name, old: self._delete(name),
            on_change=self._flush,
            resync=True,
        )

    async def __aenter__(self) -> "SeriesRecords":
        await self._mirror.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._mirror.__aexit__(*exc)

    @property
    def is_in_sync(self) -> bool:
        """True if all records have been read and are followed."""
        return self._mirror.is_in_sync

    async def refresh(self, series: str) -> None:
        """Read the newest records of a series. Raises what the store raises."""
        newest = await self._store.range(keys.series_head(series).removesuffix(HEAD))
        self._mirror.note_all(newest.items)

    def _put(self, name: str, record: Record) -> None:
        split = split_name(name)
        assert split is not None
        series, rest = split
        self._records.setdefault(series, {})[rest] = record
        self._changed.add(series)

    def _delete(self, name: str) -> None:
        split = split_name(name)
        assert split is not None
        series, rest = split
        records = self._records[series]
        del records[rest]
        if not records:
            del self._records[series]
        self._changed.add(series)

    def _flush(self) -> None:
        changed, self._changed = self._changed, set()
        for series in sorted(changed):
            records = self._records.get(series)
            if records is None:
                self._holdings.forget(series)
                self._upkeep.follow(series, {})
                continue
            head = records.get(HEAD)
            newest = (head.epoch, head.publication) if isinstance(head, SeriesHead) else (0, 0)
            versions = [each for each in records.values() if isinstance(each, PublishedVersion)]
            self._holdings.follow(series, newest, _positions(versions))
            self._upkeep.follow(series, _segments(versions))


def _parsed(item: MirroredKey) -> Record | None:
    split = split_name(item.key.removeprefix(keys.SERIES))
    if split is None:
        return None
    series, rest = split
    return parse_head(series, item.value) if rest == HEAD else parse_version(series, item.value)


def _positions(versions: Iterable[PublishedVersion]) -> Mapping[bytes, Position]:
    positions: dict[bytes, Position] = {}
    for version in versions:
        position = version.epoch, version.publication
        for segment in version.segments:
            positions[segment.digest] = max(position, positions.get(segment.digest, position))
    return positions


def _segments(versions: Iterable[PublishedVersion]) -> Mapping[bytes, PublishedSegment]:
    """The segments, those of the newest version first. Versions that share a segment may name
    different holders: the segment gets all of them."""
    segments: dict[bytes, PublishedSegment] = {}
    for version in sorted(versions, key=lambda each: each.number, reverse=True):
        for segment in version.segments:
            known = segments.get(segment.digest, segment)
            holders = tuple(dict.fromkeys((*known.holders, *segment.holders)))
            segments[segment.digest] = replace(segment, holders=holders)
    return segments
