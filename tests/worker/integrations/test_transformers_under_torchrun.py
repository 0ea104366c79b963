"""Frameworks that train a model of transformers under Shoal's rendezvous, and lose a node."""

from pathlib import Path

import pytest
import torch
from support.frameworks import gpt2_under_torchrun
from support.frameworks.gpt2_under_torchrun import EPOCHS, FRAMEWORKS
from support.processes.framework_agents import Agents

from shoal_client.local.cluster import LocalCluster

RUN_S = 120.0
FIRST, *OTHERS = FRAMEWORKS
TOLERANCE = 1e-5  # fp32: a sum over two ranks is taken in another order


@pytest.mark.long
@pytest.mark.parametrize(
    "framework", [FIRST, *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)]
)
def test_a_lost_node_leaves_the_weights_of_one_process(
    cluster: LocalCluster, tmp_path: Path, framework: str
) -> None:
    """The node "lost" is killed, agent and worker. The other one continues alone from the newest
    checkpoint: it trains the epochs that the checkpoint lacks, and no epoch twice."""
    with Agents(
        endpoint=cluster.coordinator,
        job=f"gpt2-{framework}",
        script=gpt2_under_torchrun.__file__,
        arguments=(framework,),
        directory=tmp_path,
    ) as agents:
        lost, other = (agents.torchrun(name, nodes="1:2") for name in ("lost", "other"))
        agents.await_epoch(1, RUN_S)
        agents.kill_node(lost)
        assert other.wait(RUN_S) == 0, agents.logs()

        epochs = agents.epochs()
        together = sorted(epoch.number for epoch in epochs if epoch.ranks == 2)
        alone = [epoch.number for epoch in epochs if epoch.ranks == 1]
        assert together == list(range(len(together))), agents.logs()
        assert alone == list(range(alone[0], EPOCHS)), agents.logs()
        # An epoch that was reported may have been lost before it was in a checkpoint.
        assert 1 <= alone[0] in (together[-1], together[-1] + 1)
        found = torch.load(agents.checkpoints / "final.pt", weights_only=True)
    expected = gpt2_under_torchrun.one_process()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=TOLERANCE), name
