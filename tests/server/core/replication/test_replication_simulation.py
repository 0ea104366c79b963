"""Seeded runs of servers, coordinator, etcd and workers under faults of every kind; what must
always hold is checked whenever a record is written, a copy changes, or somebody is told."""

import os

import pytest
from support.sim.replication.schedule import simulate_replication

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "200"))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_schedule_of_faults_loses_an_acknowledged_update(seed: int) -> None:
    """Once faults stop, every shard that somebody has is led, copied and answers."""
    simulate_replication(seed)
