"""Faults planted into the code that ships: the simulation runs this code, and must find them."""

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
from support.sim.publications.schedule import simulate_publications

from shoal_server.coordinator.publications import layouts
from shoal_server.coordinator.publications.leading_check import LeadingCheck
from shoal_server.coordinator.snapshots import taking
from shoal_server.core.publications import keeping, series
from shoal_server.core.publications.protocol import PartContributed
from shoal_server.core.publications.records import PublishedSegment, StoredSeries
from shoal_server.core.publications.series import PublishedSeries
from shoal_server.parameters.snapshot.barrier import SnapshotBarrier
from shoal_server.parameters.weights.upkeep import WeightUpkeep

MAX_SEEDS = 60

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def a_replaced_publisher_is_let_in(patch: Patch) -> None:
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
    """A new leader does not know the leases that its predecessor granted."""
    real = PublishedSeries.__init__

    def init(self: PublishedSeries, name: str, stored: StoredSeries, now_s: float) -> None:
        real(self, name, stored, now_s)
        self._keeps_found_until_s = now_s

    patch.setattr(PublishedSeries, "__init__", init)


def a_deposed_leader_grants_leases(patch: Patch) -> None:
    """A successor does not know of leases that the deposed leader still grants."""

    async def confirm(self: LeadingCheck) -> None:
        return None

    patch.setattr(LeadingCheck, "confirm", confirm)


def leases_are_not_looked_at(patch: Patch) -> None:
    """Versions older than the newest `keep` are dropped though readers lease them."""
    real = keeping.droppable
    patch.setattr(keeping, "droppable", lambda stored, leased: real(stored, ()))


def leases_are_held_for_less_than_readers_count_on(patch: Patch) -> None:
    """Clocks of readers and coordinator differ in rate."""
    patch.setattr("shoal_server.core.publications.readers.HELD_S", 29.0)


def parts_are_not_counted(patch: Patch) -> None:
    """Two ranks may have the same rows, and none some others."""
    patch.setattr(layouts, "check_cover", lambda layout: None)


def a_number_is_that_of_the_versions_that_are_kept(patch: Patch) -> None:
    """Numbers of lost versions must not be used again."""
    real = PublishedSeries._put_newest

    def put_newest(
        self: PublishedSeries, version: series.PublishedVersion, *rest: object, **more: object
    ) -> object:
        number = max(self.head.kept, default=0) + 1
        return real(self, series.replace(version, number=number), *rest, **more)  # type: ignore[arg-type]

    patch.setattr(PublishedSeries, "_put_newest", put_newest)


def a_committed_part_counts_as_new(patch: Patch) -> None:
    """The answer to the part was lost; the repeated part is refused as abandoned."""
    patch.setattr(PublishedSeries, "_known_as_committed", lambda self, event: None)


def copies_of_a_server_that_is_gone_are_not_replaced(patch: Patch) -> None:
    """The next loss of a server takes the version with it."""

    def follow(self: WeightUpkeep, name: str, segments: Mapping[bytes, PublishedSegment]) -> None:
        return None

    patch.setattr(WeightUpkeep, "follow", follow)


def steps_that_began_on_other_servers_are_not_merged(patch: Patch) -> None:
    """Servers cut their shards after their own steps only."""
    patch.setattr(taking, "merged", lambda reports: {})


def a_server_that_cuts_admits_new_steps(patch: Patch) -> None:
    """Steps are in the cut on some servers only."""
    patch.setattr(SnapshotBarrier, "may_enter", lambda self, step: True)


FOCUS: Mapping[Fault, Collection[str]] = {
    a_replaced_publisher_is_let_in: ["replace trainer", "pause trainer"],
    a_deposed_leader_grants_leases: ["depose unheard", "slow reader", "cut coordinator"],
    leases_are_held_for_less_than_readers_count_on: ["pause reader"],
    a_number_is_that_of_the_versions_that_are_kept: ["restart server", "kill server"],
    a_committed_part_counts_as_new: ["cut coordinator", "depose unheard", "slow trainer"],
    copies_of_a_server_that_is_gone_are_not_replaced: ["restart server", "pin"],
}
"""Kinds of simulated trouble that meet a planted fault more often than all kinds together do."""

FAULTS: Sequence[Fault] = (
    a_replaced_publisher_is_let_in,
    a_new_leader_drops_at_once,
    a_deposed_leader_grants_leases,
    leases_are_not_looked_at,
    leases_are_held_for_less_than_readers_count_on,
    parts_are_not_counted,
    a_number_is_that_of_the_versions_that_are_kept,
    a_committed_part_counts_as_new,
    copies_of_a_server_that_is_gone_are_not_replaced,
    steps_that_began_on_other_servers_are_not_merged,
    a_server_that_cuts_admits_new_steps,
)
OF_TABLES = (steps_that_began_on_other_servers_are_not_merged, a_server_that_cuts_admits_new_steps)
"""Faults in the cut of a version with tables."""


SLOW = (
    a_deposed_leader_grants_leases,
    a_number_is_that_of_the_versions_that_are_kept,
    a_committed_part_counts_as_new,
    copies_of_a_server_that_is_gone_are_not_replaced,
    *OF_TABLES,
)
"""Faults that take long to find."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.long if f in SLOW else (), id=f.__name__) for f in FAULTS],
)
def test_the_simulation_finds(fault: Fault, monkeypatch: Patch) -> None:
    """An invariant fails within some seeds; without the fault the same seed passes."""
    only, has_tables = list(FOCUS.get(fault, ())), fault in OF_TABLES
    for seed in range(MAX_SEEDS):
        with monkeypatch.context() as patch:
            fault(patch)
            is_found = _fails(seed, only, has_tables=has_tables)
        if is_found and not _fails(seed, only, has_tables=has_tables):
            return
    raise AssertionError(f"not found in {MAX_SEEDS} seeds")


def _fails(seed: int, only: Sequence[str], *, has_tables: bool) -> bool:
    try:
        simulate_publications(seed, only, has_tables=has_tables)
    except AssertionError:
        return True
    return False
