"""The same faults where even a roster of three lies in etcd in chunks."""

import pytest
from support.sim.failover import simulate_failover
from support.sim.schedule import simulate

from shoal_proto.packing import roster_chunks

NUM_SEEDS = 40


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_generations_in_chunks_outlive_what_others_do(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor puts each record together from chunks that leaders before it wrote or deleted."""
    monkeypatch.setattr(roster_chunks, "CHUNK_ENTRIES", 2)
    simulate(seed)
    simulate_failover(seed)
