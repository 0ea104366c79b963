"""Decisions which versions of a series are kept, and whether another may be sent."""

from collections.abc import Collection, Sequence

from shoal_server.core.publications.records import StoredSeries


def droppable(stored: StoredSeries, leased: Collection[int]) -> list[int]:
    """Return the versions to drop, oldest first.

    Leased versions count among the `keep` versions, so that a slow reader costs no further memory.
    """
    bound = bounded_by_keep(stored, leased)
    optional = [n for n in _unpinned(stored) if n not in bound]
    num_further = max(stored.head.keep - len(bound), 0)
    return optional[: max(len(optional) - num_further, 0)]


def bounded_by_keep(stored: StoredSeries, leased: Collection[int]) -> list[int]:
    """Versions that count among the `keep` versions and must stay: the newest and leased ones,
    unless pinned."""
    newest = max(stored.head.kept, default=0)
    return [n for n in _unpinned(stored) if n == newest or n in leased]


def may_send_another(
    stored: StoredSeries, leased: Collection[int], may_be_leased: Collection[int]
) -> bool:
    """True if another version may be sent: the series then has at most `keep` + 1 unpinned
    versions.

    `may_be_leased`: leased versions, and those that an earlier leader may have leased. The latter
    are kept in addition, up to twice as many versions in all, so that training need not wait for
    the end of their leases.
    """
    keep = stored.head.keep
    in_all = len(bounded_by_keep(stored, may_be_leased))
    return len(bounded_by_keep(stored, leased)) <= keep and in_all <= 2 * keep + 1


def _unpinned(stored: StoredSeries) -> Sequence[int]:
    return [n for n in stored.head.kept if not stored.versions[n].is_pinned]
