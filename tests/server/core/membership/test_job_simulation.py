"""Seeded simulations with faults of every kind; invariants are checked at each event."""

import os

import pytest
from support.sim.failover import (
    simulate_crash_loop,
    simulate_failover,
    simulate_outage,
    simulate_pause,
    simulate_slow_start,
    simulate_state_lost,
)
from support.sim.schedule import simulate

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "80"))
NUM_FAILOVERS = 60
NUM_OUTAGES = 30
NUM_CRASH_LOOPS = 20
NUM_PAUSES = 20
NUM_SLOW_STARTS = 40
NUM_LOST = 30
MISSED_ENDS = (416, 553, 852, 1227, 1336)
"""Seeds in which a leader dies just after it aborted a generation that some members had entered."""

PAUSES = (2235, 5514)
"""Seeds in which a pause is reported after its end, or in which a joiner gives up during a pause
while no coordinator leads."""


@pytest.mark.parametrize("seed", [*range(NUM_SEEDS), *PAUSES])
def test_after_any_faults_all_living_members_train_in_one_generation(seed: int) -> None:
    """Invariants hold at every event."""
    simulate(seed)


@pytest.mark.parametrize("seed", [*range(NUM_FAILOVERS), *MISSED_ENDS])
def test_a_change_outlives_its_leader_without_a_loss_or_delay(seed: int) -> None:
    """Members continue a planned change if leaders die and nothing else does: none is lost, and
    none waits for a time limit."""
    simulate_failover(seed)


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(NUM_OUTAGES))
def test_a_change_outlives_a_long_time_without_a_leader(seed: int) -> None:
    """Members that no leader could notify are not late: all train on under the next leader."""
    simulate_outage(seed)


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(NUM_CRASH_LOOPS))
def test_training_continues_while_leaders_die_one_after_the_other(seed: int) -> None:
    """Leaders die before they know the members, and declare none lost."""
    simulate_crash_loop(seed)


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(NUM_PAUSES))
def test_a_pause_is_waited_for_under_any_leader(seed: int) -> None:
    """The pause is longer than any limit by which members wait for each other."""
    simulate_pause(seed)


@pytest.mark.parametrize("seed", range(NUM_SLOW_STARTS))
def test_a_change_before_the_first_step_stops_at_that_step(seed: int) -> None:
    """The same holds after a break, and if members start from a checkpoint."""
    simulate_slow_start(seed)


@pytest.mark.parametrize("seed", range(NUM_LOST))
def test_a_trained_job_never_begins_from_initial_values(seed: int) -> None:
    """The members that had its state are gone, and so is the leader that knew of it."""
    simulate_state_lost(seed)
