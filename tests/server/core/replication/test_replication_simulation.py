"""Seeded simulations of servers, coordinator, etcd and workers, with faults.

Invariants are checked whenever a record is written, a copy changes, or a push is answered.
"""

import os

import pytest
from support.sim.replication.schedule import simulate_replication
from support.sim.replication.store import ETCD
from support.sim.replication.world import ReplicationWorld

NUM_SEEDS = int(os.environ.get("SHOAL_SIMULATION_SEEDS", "80"))


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_acknowledged_update_is_lost_under_faults(seed: int) -> None:
    """Every shard with a remaining copy has a primary and its backups once the faults stop."""
    simulate_replication(seed)


def test_a_joining_server_named_again_while_its_primary_is_cut_off_gets_the_shard() -> None:
    """The primary makes the server another offer: otherwise it would wait for the server for ever,
    and no worker could push."""
    simulate_replication(52, ["deposed without notice"])


@pytest.mark.parametrize("seed", [0, 9, 17])
def test_a_joining_server_that_dropped_an_image_gets_another_one(seed: int) -> None:
    """A joining server is cut off from etcd for so long that the record does not name it for a
    time. Its primary, cut off as well, does not notice, and waits for the reply to its image."""
    world = ReplicationWorld(seed, num_servers=2, num_shards=1, copies=2, lease_ttl_s=6.0)
    (key,) = world.keys
    world.setting.slow_s = 40.0
    assert world.run(10.0, until=lambda: world.store.records[key].joining is not None)
    record = world.store.records[key]
    assert record.joining is not None
    joiner, primary = record.joining, record.primary
    world.cut(f"{joiner.server_id}#{joiner.incarnation}", ETCD, 8.0)
    world.clock.later(
        5.0, lambda: world.cut(f"{primary.server_id}#{primary.incarnation}", ETCD, 8.0)
    )
    world.run(20.0)
    world.calm(accepts_loss=False)
    assert world.run(300.0, until=lambda: not world.unrest()), world.unrest()


def test_a_shard_with_an_empty_disk_is_lost_once_its_last_process_counts_as_dead() -> None:
    """The last process ran on another machine, so that only time shows that it is dead."""
    world = ReplicationWorld(1, num_servers=2, num_shards=1, copies=1)
    (key,) = world.keys
    assert world.run(10.0, until=lambda: world.store.records[key].on_disk == "s0")
    world.kill(world.current["s0"])
    world.wipe("s0")
    world.start("s0", is_replacement=True)
    dead_after_s = world.setting.limits.dead_after_s
    world.run(dead_after_s / 2)
    assert not world.lost()
    assert world.run(2 * dead_after_s, until=lambda: bool(world.lost())), world.store.records
