"""Seeded runs under faults of every kind; what must always hold is checked at each event."""

import os

import pytest
from support.sim.schedule import simulate

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "200"))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_any_schedule_of_faults_ends_in_one_generation_of_all_who_live(seed: int) -> None:
    """Invariants hold at every event; once faults stop, the living train together."""
    simulate(seed)
