"""Decisions on a series: which versions are kept, and whether another version may be sent."""

from collections.abc import Collection, Sequence

from shoal_server.core.publications.records import StoredSeries


def droppable(stored: StoredSeries, leased: Collection[int]) -> list[int]:
    """The versions to drop, oldest first.

    The newest version stays, and so do all leased and pinned ones. Leased versions count among the
    `keep` versions: while readers hold leases on older versions, fewer versions in between are
    kept, so a slow reader costs no further memory.
    """
    bound = bounded_by_keep(stored, leased)
    optional = [n for n in _unpinned(stored) if n not in bound]
    num_further = max(stored.head.keep - len(bound), 0)
    return optional[: max(len(optional) - num_further, 0)]


def bounded_by_keep(stored: StoredSeries, leased: Collection[int]) -> list[int]:
    """Versions that may not be dropped and count among the `keep` versions: the newest version and
    leased versions, unless they are pinned."""
    newest = max(stored.head.kept, default=0)
    return [n for n in _unpinned(stored) if n == newest or n in leased]


def may_send_another(
    stored: StoredSeries, leased: Collection[int], may_be_leased: Collection[int]
) -> bool:
    """True if another version may be sent: the series then has at most `keep` + 1 versions, not
    counting pinned versions.

    `may_be_leased`: the leased versions, and versions on which an earlier leader may have granted
    leases that this leader does not know. Versions with unknown leases are kept in addition, so
    that training need not wait until those leases have ended. So there may be up to twice as many
    versions in all, however many leaders follow each other until then.
    """
    keep = stored.head.keep
    in_all = len(bounded_by_keep(stored, may_be_leased))
    return len(bounded_by_keep(stored, leased)) <= keep and in_all <= 2 * keep + 1


def _unpinned(stored: StoredSeries) -> Sequence[int]:
    return [n for n in stored.head.kept if not stored.versions[n].is_pinned]
