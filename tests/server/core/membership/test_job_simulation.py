"""Seeded runs under faults of every kind; what must always hold is checked at each event."""

import os

import pytest
from support.sim.failover import simulate_failover, simulate_outage
from support.sim.schedule import simulate

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "200"))
NUM_FAILOVERS = 130
NUM_OUTAGES = 60
MISSED_ENDS = (416, 553, 852, 1227, 1336)
"""A leader dies right after it aborted a generation that some had gone over to already."""


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_any_schedule_of_faults_ends_in_one_generation_of_all_who_live(seed: int) -> None:
    """Invariants hold at every event; once faults stop, the living train together."""
    simulate(seed)


@pytest.mark.parametrize("seed", [*range(NUM_FAILOVERS), *MISSED_ENDS])
def test_a_change_outlives_its_leader_without_loss_or_delay(seed: int) -> None:
    """Only leaders die: every member goes on, and none waits for a time limit."""
    simulate_failover(seed)


@pytest.mark.parametrize("seed", range(NUM_OUTAGES))
def test_a_change_outlives_a_long_time_without_a_leader(seed: int) -> None:
    """Nobody is late for what nobody could tell it: every member goes on with the next leader."""
    simulate_outage(seed)
