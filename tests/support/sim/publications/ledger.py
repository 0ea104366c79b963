"""Invariants of published weights, checked at each write of a record, each install, each death.

The ledger sees etcd, the memory of each server, and the leases that each reader counts on. It does
not use the code under test for its checks.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from support.sim.publications.shards import NUM_SHARDS, CutContent
from support.sim.virtual_time import Clock

from shoal_proto.v1 import weights_pb2 as pb
from shoal_server.core.publications.limits import HELD_S
from shoal_server.core.publications.records import PublishedVersion, Publisher, StoredSeries
from shoal_server.etcd import keys
from shoal_server.etcd.records import series as records

BEGUN_BEFORE_S = 60.0
"""Longest time from the begin of a publication to the commit of its version."""


@dataclass(frozen=True)
class Content:
    """A segment as its publisher made it."""

    series: str
    publisher: Publisher
    publication: int
    rank: int
    world: int
    data: bytes


@dataclass
class _Copies:
    """The copies of one segment."""

    needed: int
    """Number of copies to keep; the segment may be lost only after as many deaths of holders."""
    num_deaths: int = 0
    """Number of deaths of holders since the segment last had `needed` copies."""


Living = Mapping[str, Callable[[str, bytes], bool]]
"""Servers whose processes run, each with a function that says if it has a segment of a series."""


@dataclass
class Ledger:
    clock: Clock
    living: Callable[[], Living]
    leases: Callable[[], Iterable[tuple[str, str, int]]]
    """Returns (reader, series, version) of each lease that is valid by its reader's clock."""
    contents: dict[bytes, Content | CutContent] = field(default_factory=dict)
    pushed: dict[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    """The last acknowledged step of each session when a publication with tables began, by publisher
    and publication."""
    partial: dict[bytes, set[str]] = field(default_factory=dict)
    """Steps that a cut was reported to have in part, by the cut."""
    num_cuts: int = 0
    """Number of committed versions with tables."""
    series: dict[str, StoredSeries] = field(default_factory=dict)
    """Series as stored in etcd."""
    ever: dict[str, dict[int, PublishedVersion]] = field(default_factory=lambda: defaultdict(dict))
    """Every version that was ever committed."""
    owners: dict[tuple[str, int], Publisher] = field(default_factory=dict)
    layouts: dict[bytes, pb.Layout] = field(default_factory=dict)
    copies: dict[tuple[str, bytes], _Copies] = field(default_factory=dict)
    _ended: list[tuple[float, frozenset[tuple[str, bytes]]]] = field(default_factory=list)
    """Time and segments of each server that ended."""
    lost: set[tuple[str, int]] = field(default_factory=set)
    elected_s: float = -math.inf
    """Time of the newest leader's election."""
    num_commits: int = 0
    num_installs: int = 0
    num_drops: int = 0

    # --- records ---

    def recorded(self, values: Mapping[str, bytes]) -> None:
        """Check a change in etcd. `values`: all records under the prefix of series."""
        for name in records.names_in(values):
            new = records.parse_series(name, values) or StoredSeries()
            old = self.series.get(name, StoredSeries())
            if new != old:
                self.series[name] = new
                self._changed(name, old, new)
        self.check_copies()

    def _changed(self, name: str, old: StoredSeries, new: StoredSeries) -> None:
        self._check_numbers(name, old, new)
        self._check_epochs(name, old, new)
        for number in sorted(new.versions.keys() - old.versions.keys()):
            self._check_whole(name, new.versions[number])
        for number in sorted(old.versions.keys() - new.versions.keys()):
            self._check_dropped(name, number, new)
        if new.head.publication != old.head.publication and new.head.number > old.head.number:
            self._check_bound(name, new)

    def _check_numbers(self, name: str, old: StoredSeries, new: StoredSeries) -> None:
        """I1: numbers rise by one, and a number's bytes never change."""
        rise = new.head.number - old.head.number
        assert 0 <= rise <= 1, f"{name} went from version {old.head.number} to {new.head.number}"
        added = sorted(new.versions.keys() - old.versions.keys())
        assert added == ([new.head.number] if rise else []), f"{name}: {added} were added"
        for number, version in new.versions.items():
            known = self.ever[name].setdefault(number, version)
            assert known.digest == version.digest, f"{name}: version {number} has other bytes"
        self.num_commits += rise

    def _check_epochs(self, name: str, old: StoredSeries, new: StoredSeries) -> None:
        """I5: epochs rise, and each has one publisher, which alone commits in it."""
        assert new.head.epoch >= old.head.epoch, f"{name}: epoch {old.head.epoch} is back"
        owner = self.owners.setdefault((name, new.head.epoch), new.head.publisher)
        assert owner == new.head.publisher, f"{name}: epoch {new.head.epoch} has two publishers"
        if new.head.number == old.head.number:
            return
        version = new.versions[new.head.number]
        assert version.epoch == old.head.epoch == new.head.epoch, (
            f"{name}: {version.number} unfenced"
        )
        if version.rolled_back_to:
            back = self.ever[name][version.rolled_back_to]
            assert back.digest == version.digest, f"{name}: a rollback to other bytes"
            return
        assert version.publication > old.head.publication or new.head.epoch != old.head.epoch
        of_publisher = version.segments[:1] if version.tables_cut else version.segments
        if version.tables_cut:
            self._check_cut(name, version, owner)
        for rank, segment in enumerate(of_publisher):
            made = self.contents[segment.digest]
            assert isinstance(made, Content)
            assert made.publisher == owner, f"{name}: {version.number} is of {made.publisher}"
            assert made.publication == version.publication, f"{name}: mixed publications"
            assert (made.rank, made.series) == (rank, name), f"{name}: segments are mixed up"

    def _check_whole(self, name: str, version: PublishedVersion) -> None:
        """I7: a version has each element once; checked by counting all of them."""
        if version.rolled_back_to:
            return
        layout = self.layouts[version.layout_digest]
        counts: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        for each in layout.slices:
            # A slice without sizes is a whole tensor.
            sizes = each.sizes or layout.tensors[each.tensor].shape
            offsets = each.offsets or [0] * len(sizes)
            spans = [range(a, a + n) for a, n in zip(offsets, sizes, strict=True)]
            for element in itertools.product(*spans):
                counts[each.tensor, element] += 1
        wanted = {
            (index, element)
            for index, tensor in enumerate(layout.tensors)
            for element in itertools.product(*map(range, tensor.shape))
        }
        assert counts.keys() == wanted and set(counts.values()) == {1}, (
            f"{name}: version {version.number} does not cover its model"
        )
        first = self.contents[version.segments[0].digest]
        assert isinstance(first, Content)
        num_of_servers = NUM_SHARDS if version.tables_cut else 0
        assert len(version.segments) == first.world + num_of_servers

    def _check_cut(self, name: str, version: PublishedVersion, owner: Publisher) -> None:
        """I11: a version with tables has all shards as of one instant: each step is on all of them
        or on none, except reported ones of members that died half-way. It has every step that was
        acknowledged before its publication began."""
        self.num_cuts += 1
        shards = [self.contents[segment.digest] for segment in version.segments[1:]]
        found = [each for each in shards if isinstance(each, CutContent)]
        assert [(s.series, s.shard_id) for s in found] == [(name, n) for n in range(NUM_SHARDS)]
        text = "\n".join(self.partial[version.tables_cut])
        pushed = self.pushed[str(owner), version.publication]
        for session in {session for each in found for session in each.applied}:
            last = {each.applied.get(session, 0) for each in found}
            torn = range(min(last) + 1, max(last) + 1)
            assert all(f"push {n} of {session} " in text for n in torn), (
                f"{name}: version {version.number} has push {max(last)} of {session} in part"
            )
            assert min(last) >= pushed.get(session, 0), (
                f"{name}: version {version.number} is of before push {pushed[session]} of {session}"
            )

    def _check_dropped(self, name: str, number: int, new: StoredSeries) -> None:
        """I6: no reader has a lease on a dropped version, and the newest is not dropped."""
        self.num_drops += 1
        if number in new.head.lost:
            self.lost.add((name, number))
            return
        assert number < new.head.number, f"{name}: the newest version was dropped"
        holding = [reader for reader, of, n in self.leases() if (of, n) == (name, number)]
        assert not holding, f"{name}: version {number} was dropped, leased by {holding}"

    def _check_bound(self, name: str, new: StoredSeries) -> None:
        """I10: at most `keep` + 1 models besides pinned ones; twice as many while leases granted by
        an earlier leader may last."""
        pinned = {v.digest for v in new.versions.values() if v.is_pinned}
        contents = {v.digest for v in new.versions.values()} - pinned
        most = new.head.keep + 1
        if self.clock.now_s < self.elected_s + HELD_S + BEGUN_BEFORE_S:
            most *= 2
        assert len(contents) <= most, f"{name} keeps {sorted(new.versions)}"

    # --- bytes ---

    def acknowledged(self, series: str, digest: bytes, num_holders: int, *, asked_s: float) -> None:
        """Record that `num_holders` servers have acknowledged a segment, to a caller that asked
        them at `asked_s`. Some may have ended since."""
        ended = [had for at_s, had in self._ended if at_s >= asked_s and (series, digest) in had]
        needed = min(num_holders, 2)
        self.copies[series, digest] = _Copies(needed=needed, num_deaths=len(ended))

    def died(self, had: Iterable[tuple[str, bytes]]) -> None:
        """Record the end of a server's process, which had these segments."""
        had = frozenset(had)
        self._ended.append((self.clock.now_s, had))
        for key in had:
            if key in self.copies:
                self.copies[key].num_deaths += 1
        self.check_copies()

    def check_copies(self) -> None:
        """I2: a kept version is on some server, unless all its holders died before the copies could
        be replaced."""
        living = self.living()
        for name, stored in self.series.items():
            for version in stored.versions.values():
                for segment in version.segments:
                    known = self.copies.get((name, segment.digest))
                    if known is None:
                        raise AssertionError(f"{name}: {version.number} was never acknowledged")
                    num = sum(has(name, segment.digest) for has in living.values())
                    if num >= known.needed:
                        known.num_deaths = 0
                    assert num or known.num_deaths >= known.needed, (
                        f"{name}: no server has version {version.number}, after"
                        f" {known.num_deaths} deaths"
                    )

    # --- answers ---

    def answered(self, series: str, digest: bytes, rank: int, version: pb.VersionRecord) -> None:
        """Check that a publisher's part is in the version reported to it."""
        known = self.ever[series].get(version.number)
        assert known is not None, f"{series}: version {version.number} is in no record"
        assert known.segments[rank].digest == digest, (
            f"{series}: the reported version is another publisher's"
        )

    def abandoned(self, series: str, epoch: int, publication: int) -> None:
        """Check that a publication reported as abandoned never becomes a version."""
        for version in self.ever[series].values():
            is_it = (version.epoch, version.publication) == (epoch, publication)
            is_kept = version.number in self.series[series].versions
            assert not (is_it and is_kept), f"{series}: {version.number} is said to be abandoned"

    def installed(
        self, series: str, before: int, version: pb.VersionRecord, data: list[bytes]
    ) -> None:
        """Check the segments that a reader has installed as a version."""
        self.num_installs += 1
        assert version.number >= before, f"{series}: a reader went back to {version.number}"
        known = self.ever[series][version.number]
        assert known.digest == version.digest
        wanted = [self.contents[segment.digest].data for segment in known.segments]
        assert data == wanted, f"{series}: version {version.number} was torn"


def series_values(items: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the records of series among all keys."""
    return {key: value for key, value in items.items() if key.startswith(keys.SERIES)}
