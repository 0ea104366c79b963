"""Sessions with a bound on staleness while members are killed: effects on pace and samples."""

import os
import signal
from pathlib import Path

import pytest
from support.members.async_members import trained
from support.network import http
from support.processes.ranks import Rank, Ranks
from support.training import rank_bodies
from support.training.rank_bodies import BATCH_SIZE, EPOCHS, NUM_SAMPLES, Run

from shoal_client.local.cluster import LocalCluster

IN_FLIGHT = 3
"""Batches that one member may have begun: one trained on but not reported, one being trained on,
and one being reported when it was killed."""


@pytest.mark.parametrize("strategy", ["ssp", pytest.param("bsp", marks=pytest.mark.long)])
def test_a_killed_member_delays_no_other_and_costs_no_sample(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """Two members are killed, one of which comes back. The others continue at once, and every
    sample is trained on. Repeated samples are limited by the ledger's count, and by what the killed
    members had in progress."""
    job = f"{strategy}-kills"
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def start(name: str, fault: str = "", at_step: int = 0) -> Rank:
        run = Run(
            coordinator=cluster.coordinator,
            job=job,
            member_id=name,
            desired_members=3,
            strategy=strategy,
            fault=fault,
            at_step=at_step,
            hold_at=5 if name == "a" else -1,
            gate=str(gate),
        )
        return ranks.start(rank_bodies.train, run)

    with Ranks() as ranks:
        stays = start("a")
        killed = [start("b", "kill in forward", 2), start("c", "kill in backward", 3)]
        for each in killed:
            assert each.join() == -signal.SIGKILL
            each.drain()
        stays.expect("holds")
        again = start("b")
        again.expect("tried")
        gate.write_bytes(b"")
        stays.expect("finished")
        again.expect("finished")
        found = trained([stays, again, *killed])
        path = f"{cluster.http_url}/api/v1/jobs/{job}"
        samples = http.get(path).json()["samples"]
    total = NUM_SAMPLES * EPOCHS
    assert len(found) == total, "a sample was lost"
    assert (samples["completed"], samples["exhausted"]) == (total, True)
    num_repeated = found.total() - total
    assert num_repeated <= min(samples["repeated_max"], IN_FLIGHT * BATCH_SIZE * len(killed))
