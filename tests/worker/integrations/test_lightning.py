"""Lightning's Trainer under Shoal's rendezvous, in a script that knows nothing of Shoal."""

from pathlib import Path

import pytest
from framework_agents import Agents

from shoal_client.local.cluster import LocalCluster

RUN_S = 90.0
EPOCHS = 12


@pytest.mark.timeout(240)
def test_a_killed_worker_is_started_again_and_goes_on_from_the_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with Agents(
        endpoint=cluster.coordinator,
        job="lightning-nodes",
        script="lightning_digits.py",
        directory=tmp_path,
    ) as agents:
        nodes = [agents.torchrun(name, nodes="2") for name in ("first", "second")]
        agents.await_epoch(1, RUN_S)
        agents.kill_worker(nodes[1])
        assert [node.wait(RUN_S) for node in nodes] == [0, 0], agents.logs()

        epochs = agents.epochs()
        assert {epoch.ranks for epoch in epochs} == {2}
        numbers = [epoch.number for epoch in epochs]
        assert set(numbers) == set(range(EPOCHS))
        assert numbers.count(0) == 1, "it began again from the start"
        assert "Restored all states from the checkpoint" in agents.logs()
        by_number = {epoch.number: epoch.loss for epoch in epochs}
        assert by_number[EPOCHS - 1] < 0.2 < by_number[0]
