"""Warm standby: a real process that has joined and built its model, and waits to replace a lost
rank."""

import os
import signal
from dataclasses import replace
from pathlib import Path

from support.members.standing_by import await_standby
from support.processes.ranks import Ranks
from support.training import rank_bodies
from support.training.rank_bodies import NUM_STEPS, Run

from shoal_client.local.cluster import LocalCluster


def test_a_standby_takes_over_the_lost_rank(cluster: LocalCluster, tmp_path: Path) -> None:
    """The standby trains in the very next generation, in the rank that was lost, with the
    survivor's state; its process existed before the loss."""
    gates = {name: tmp_path / name for name in "ab"}
    for gate in gates.values():
        os.mkfifo(gate)
    run = Run(
        coordinator=cluster.coordinator,
        job="standby",
        member_id="",
        desired_members=2,
        max_members=2,
        hold_at=6,
    )
    with Ranks() as ranks:
        a, b = (
            ranks.start(rank_bodies.train, replace(run, member_id=name, gate=str(gates[name])))
            for name in "ab"
        )
        lost_rank = b.expect("tried")["rank"]
        for rank in (a, b):
            rank.expect("holds")
        c = ranks.start(rank_bodies.train, replace(run, member_id="c", hold_at=-1))
        await_standby(cluster.http_url, run.job, "c")
        b.send_signal(signal.SIGKILL)
        gates["a"].write_bytes(b"")
        first = c.expect("tried")
        assert first["world_size"] == 2
        assert first["rank"] == lost_rank
        assert first["step"] == 6
        assert first["generation"] == 2
        for rank in (a, c):
            assert rank.expect("finished")["step"] == NUM_STEPS
