"""Faults planted into the shipped code: the simulation runs this code, and must find them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import pytest
from support.sim.errors import fails
from support.sim.publications.schedule import simulate_publications

from shoal_server.coordinator.publications import layouts
from shoal_server.coordinator.snapshots import taking
from shoal_server.core.publications import keeping, series
from shoal_server.core.publications.protocol import PartContributed
from shoal_server.core.publications.records import PublishedSegment, StoredSeries
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.parameters.snapshot.barrier import SnapshotBarrier
from shoal_server.parameters.weights.upkeep import WeightUpkeep

MAX_SEEDS = 60

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def parts_of_a_replaced_publisher_are_accepted(patch: Patch) -> None:
    """Parts of a replaced publisher count for the current epoch."""
    real = PublishedSeries._contribute

    def contribute(self: PublishedSeries, event: PartContributed, now_s: float) -> series.Effects:
        head = self.head
        changed = PartContributed(
            call=event.call,
            publisher=head.publisher,
            epoch=head.epoch,
            publication=event.publication,
            part=event.part,
        )
        yield from real(self, changed, now_s)

    patch.setattr(PublishedSeries, "_contribute", contribute)


def a_new_leader_drops_at_once(patch: Patch) -> None:
    """A new leader drops versions that readers leased from the leader before it."""
    real = PublishedSeries.__init__

    def init(self: PublishedSeries, name: str, stored: StoredSeries, now_s: float) -> None:
        real(self, name, stored, now_s)
        self._keeps_found_until_s = now_s

    patch.setattr(PublishedSeries, "__init__", init)


def a_deposed_leader_grants_leases(patch: Patch) -> None:
    """The new leader does not know of leases that the deposed one still grants."""

    async def confirm(self: LeaderStore) -> None:
        return None

    patch.setattr(LeaderStore, "confirm", confirm)


def leases_are_ignored(patch: Patch) -> None:
    """Versions older than the newest `keep` are dropped although readers lease them."""
    real = keeping.droppable
    patch.setattr(keeping, "droppable", lambda stored, leased: real(stored, ()))


def leases_end_sooner_than_readers_expect(patch: Patch) -> None:
    """The coordinator ends a lease earlier than its reader does."""
    patch.setattr("shoal_server.core.publications.readers.HELD_S", 29.0)


def parts_are_not_checked(patch: Patch) -> None:
    """Two ranks may have the same rows, and some rows may be in no part."""
    patch.setattr(layouts, "check_cover", lambda layout: None)


def numbers_continue_from_the_versions_that_are_kept(patch: Patch) -> None:
    """The number of a lost version is used again."""
    real = PublishedSeries._put_newest

    def put_newest(
        self: PublishedSeries, version: series.PublishedVersion, *rest: object, **more: object
    ) -> object:
        number = max(self.head.kept, default=0) + 1
        return real(self, series.replace(version, number=number), *rest, **more)  # type: ignore[arg-type]

    patch.setattr(PublishedSeries, "_put_newest", put_newest)


def a_part_of_a_committed_version_counts_as_new(patch: Patch) -> None:
    """The answer to the part was lost; the repeated part is refused as abandoned."""
    patch.setattr(PublishedSeries, "_known_as_committed", lambda self, event: None)


def copies_of_a_lost_server_are_not_replaced(patch: Patch) -> None:
    """The version is lost with the next server."""

    def follow(self: WeightUpkeep, name: str, segments: Mapping[bytes, PublishedSegment]) -> None:
        return None

    patch.setattr(WeightUpkeep, "follow", follow)


def steps_of_other_servers_are_not_merged(patch: Patch) -> None:
    """Each server cuts its shards after the steps that it knows itself."""
    patch.setattr(taking, "merged", lambda reports: {})


def new_steps_are_admitted_during_a_cut(patch: Patch) -> None:
    """The cut has some steps on some servers only."""
    patch.setattr(SnapshotBarrier, "may_enter", lambda self, step: True)


FOCUS: Mapping[Fault, Collection[str]] = {
    parts_of_a_replaced_publisher_are_accepted: ["replace trainer", "pause trainer"],
    a_deposed_leader_grants_leases: ["depose without notice", "slow reader", "cut coordinator"],
    leases_end_sooner_than_readers_expect: ["pause reader"],
    numbers_continue_from_the_versions_that_are_kept: ["restart server", "kill server"],
    a_part_of_a_committed_version_counts_as_new: [
        "cut coordinator",
        "depose without notice",
        "slow trainer",
    ],
    copies_of_a_lost_server_are_not_replaced: ["restart server", "pin"],
}
"""Kinds of simulated faults with which the planted one is found sooner than with all kinds."""

FAULTS: Sequence[Fault] = (
    parts_of_a_replaced_publisher_are_accepted,
    a_new_leader_drops_at_once,
    a_deposed_leader_grants_leases,
    leases_are_ignored,
    leases_end_sooner_than_readers_expect,
    parts_are_not_checked,
    numbers_continue_from_the_versions_that_are_kept,
    a_part_of_a_committed_version_counts_as_new,
    copies_of_a_lost_server_are_not_replaced,
    steps_of_other_servers_are_not_merged,
    new_steps_are_admitted_during_a_cut,
)
OF_TABLES = (steps_of_other_servers_are_not_merged, new_steps_are_admitted_during_a_cut)
"""Faults in the cut of a version with tables."""


SLOW = (
    a_deposed_leader_grants_leases,
    numbers_continue_from_the_versions_that_are_kept,
    a_part_of_a_committed_version_counts_as_new,
    copies_of_a_lost_server_are_not_replaced,
    *OF_TABLES,
)
"""Faults that take long to find."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.long if f in SLOW else (), id=f.__name__) for f in FAULTS],
)
def test_the_simulation_finds_the_fault(fault: Fault, monkeypatch: Patch) -> None:
    """An invariant fails within `MAX_SEEDS` seeds; without the fault the same seed passes."""
    only, has_tables = list(FOCUS.get(fault, ())), fault in OF_TABLES
    for seed in range(MAX_SEEDS):
        simulated = partial(simulate_publications, seed, only, has_tables=has_tables)
        with monkeypatch.context() as patch:
            fault(patch)
            is_found = fails(simulated)
        if is_found and not fails(simulated):
            return
    raise AssertionError(f"not found in {MAX_SEEDS} seeds")
