"""A script of Hugging Face accelerate, as its users write it, under Shoal's rendezvous."""

from pathlib import Path

import pytest
from support.processes.framework_agents import Agents

from shoal_client.local.cluster import LocalCluster

RUN_S = 90.0
EPOCHS = 12


@pytest.mark.long
def test_a_lost_node_costs_only_the_epochs_after_the_newest_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two nodes train, one started by torchrun and one by `accelerate launch`. One is killed, agent
    and worker. The other continues from the newest checkpoint, and trains every epoch that the
    checkpoint does not contain."""
    with Agents(
        endpoint=cluster.coordinator,
        job="accelerate-nodes",
        script="accelerate_digits.py",
        directory=tmp_path,
    ) as agents:
        lost = agents.torchrun("lost", nodes="1:2")
        other = agents.accelerate_launch("other", nodes="1:2")
        agents.await_epoch(1, RUN_S)
        agents.kill_node(lost)
        assert other.wait(RUN_S) == 0, agents.logs()

        epochs = sorted(agents.epochs(), key=lambda epoch: (-epoch.ranks, epoch.number))
        together = [epoch.number for epoch in epochs if epoch.ranks == 3]
        after = [epoch.number for epoch in epochs if epoch.ranks == 2]
        assert together[:2] == [0, 1], agents.logs()
        assert after == list(range(after[0], EPOCHS))
        assert after[0] in (together[-1], together[-1] + 1)
        by_number = {epoch.number: epoch.loss for epoch in epochs}
        assert by_number[EPOCHS - 1] < 0.2 < by_number[0]
        saved = sorted(path.name for path in agents.checkpoints.glob("epoch-*"))
        assert saved == [f"epoch-{number:03d}" for number in range(EPOCHS)]
