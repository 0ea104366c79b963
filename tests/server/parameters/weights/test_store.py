"""Segments that a server holds: those of versions, and others for a grace period."""

import pytest
from support.weights.segments import segment_of

from shoal_proto.errors import Overloaded, StaleEpoch
from shoal_proto.segments.sealed import Segment
from shoal_server.parameters.weights.store import GRACE_S, SegmentOrigin, SegmentStore

SERIES = "job/policy"


A, B, C = (segment_of(name) for name in (b"a", b"b", b"c"))


def put(
    store: SegmentStore,
    segment: Segment,
    publication: int,
    *,
    epoch: int = 1,
    rank: int = 0,
    now_s: float = 0.0,
) -> None:
    origin = SegmentOrigin(epoch=epoch, publication=publication, rank=rank)
    store.admit(SERIES, segment.digest, origin)
    store.insert(SERIES, segment, origin, now_s)


def held(store: SegmentStore) -> list[Segment]:
    return [each.segment for each in store.held()]


def test_a_segment_of_no_version_is_dropped_after_the_grace_period() -> None:
    store = SegmentStore()
    put(store, A, 1)
    assert store.sweep(GRACE_S - 1) == []
    assert [each.segment for each in store.sweep(GRACE_S)] == [A]
    assert held(store) == []


def test_a_repeated_put_begins_the_grace_period_anew() -> None:
    store = SegmentStore()
    put(store, A, 1)
    put(store, A, 1, now_s=GRACE_S - 1)
    assert store.sweep(GRACE_S) == []


def test_a_publication_in_progress_begins_the_grace_period_of_its_segments_anew() -> None:
    store = SegmentStore()
    put(store, A, 1)
    put(store, B, 1, rank=1)
    put(store, C, 2)
    store.renew_all(SERIES, (1, 1), GRACE_S - 1)
    store.renew_all("job/another", (1, 2), GRACE_S - 1)
    assert [each.segment for each in store.sweep(GRACE_S)] == [C]
    assert held(store) == [A, B]


def test_bytes_of_kept_versions_that_are_put_again_do_not_count_as_undecided() -> None:
    """They stay as long as the versions, whose publishers may be gone: nothing else could free a
    place for the next version."""
    store = SegmentStore()
    named = {A.digest: (1, 1), B.digest: (1, 2)}
    put(store, A, 1)
    put(store, B, 2)
    store.follow(SERIES, (1, 2), named, 0.0)
    put(store, A, 1, epoch=2)
    put(store, B, 1, epoch=3)
    store.follow(SERIES, (4, 0), named, 0.0)
    put(store, C, 1, epoch=4)
    assert C in held(store)


def test_a_segment_stays_as_long_as_a_version_names_it() -> None:
    store = SegmentStore()
    put(store, A, 1)
    assert store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0) == []
    assert store.sweep(100 * GRACE_S) == []
    assert store.follow(SERIES, (1, 2), {B.digest: (1, 2)}, 2.0) == [A]


def test_a_segment_of_the_next_publication_survives_the_version_before() -> None:
    """The same bytes are published again, and the older version is dropped before the newer is
    known."""
    store = SegmentStore()
    put(store, A, 1)
    store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0)
    put(store, A, 2, now_s=2.0)
    assert store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 3.0) == []
    assert store.follow(SERIES, (1, 1), {}, 4.0) == []
    assert store.follow(SERIES, (1, 2), {A.digest: (1, 2)}, 5.0) == []
    assert store.follow(SERIES, (1, 3), {}, 6.0) == [A]


def test_a_segment_of_a_publication_before_a_version_is_dropped_at_once() -> None:
    store = SegmentStore()
    put(store, A, 1, rank=2)
    put(store, B, 2)
    put(store, C, 3, rank=1)
    assert store.follow(SERIES, (1, 2), {B.digest: (1, 2)}, 1.0) == [A]
    assert held(store) == [B, C]


def test_segments_of_an_earlier_epoch_are_dropped_and_refused() -> None:
    store = SegmentStore()
    put(store, A, 5, epoch=1)
    assert store.follow(SERIES, (2, 0), {}, 1.0) == [A]
    with pytest.raises(StaleEpoch, match="expected epoch 2"):
        put(store, B, 6, epoch=1)
    put(store, B, 1, epoch=2)


def test_the_segments_of_a_rank_without_a_version_are_bounded() -> None:
    store, further = SegmentStore(), segment_of(b"d")
    put(store, A, 1)
    put(store, B, 2)
    for publication in (2, 3):
        with pytest.raises(Overloaded):
            put(store, further, publication)
    put(store, A, 1)
    put(store, C, 3, rank=1)
    # Once one of them is in a version, another one is accepted.
    store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0)
    put(store, further, 3)


def test_an_abandoned_segment_is_dropped_at_once() -> None:
    store = SegmentStore()
    put(store, A, 1)
    assert store.abandon(SERIES, 1, 1, frozenset({1})) == []
    assert store.abandon(SERIES, 0, 2, frozenset({1})) == []
    assert store.abandon(SERIES, 0, 1, frozenset({1})) == [A]


def test_a_segment_of_a_version_cannot_be_abandoned() -> None:
    store = SegmentStore()
    put(store, A, 1)
    store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0)
    assert store.abandon(SERIES, 0, 1, frozenset({1})) == []


def test_a_removed_series_keeps_only_segments_of_no_version() -> None:
    store = SegmentStore()
    put(store, A, 1)
    store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0)
    put(store, B, 2, now_s=1.0)
    assert store.forget(SERIES) == [A]
    assert [each.segment for each in store.sweep(GRACE_S + 1)] == [B]


def test_a_copy_fetched_from_a_peer_stays_for_the_grace_period() -> None:
    store = SegmentStore()
    store.insert(SERIES, A, None, 0.0)
    assert store.follow(SERIES, (9, 9), {}, 1.0) == []
    assert [each.segment for each in store.sweep(GRACE_S)] == [A]


def test_a_segment_of_a_version_stays_if_its_next_publication_is_abandoned() -> None:
    store = SegmentStore()
    put(store, A, 1)
    store.follow(SERIES, (1, 1), {A.digest: (1, 1)}, 1.0)
    put(store, A, 2)
    assert store.abandon(SERIES, 0, 1, frozenset({2})) == []
    assert held(store) == [A]
