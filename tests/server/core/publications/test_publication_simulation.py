"""Seeded simulations of coordinators, servers, publishers, readers and etcd, with faults.

The coordinators' service, its writes to etcd, the servers' store, records and repair are the code
that ships. Invariants are checked at each write of a record, each install and each death.
"""

import os

import pytest
from support.sim.publications.schedule import simulate_publications

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "40"))


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_version_stays_whole_and_available_under_faults(seed: int) -> None:
    """All readers get the newest version once the faults stop, and versions have their copies."""
    simulate_publications(seed)


@pytest.mark.long
def test_a_seed_repeats_the_same_run() -> None:
    """A failure can be studied by running its seed again."""
    runs = [simulate_publications(3) for _ in range(2)]
    assert runs[0].story == runs[1].story
    counts = [(r.ledger.num_commits, r.ledger.num_installs, r.ledger.num_drops) for r in runs]
    assert counts[0] == counts[1] and min(counts[0]) > 0
