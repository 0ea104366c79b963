"""Kills of a member when the others have the least of its state: in the job's first step, and after
the last batch, when no step is left that could be taken again."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.members.elastic_schedule import elastic
from support.processes.ranks import Ranks
from support.training import elastic_bodies
from support.training.elastic_bodies import ENDING_EPOCHS, NUM_SAMPLES, one_process

from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
STRATEGIES: list[tuple[str, Mapping[str, Any]]] = [
    ("fsdp", {}),
    ("zero1", {}),
    ("pipeline", {}),
    ("hybrid", {"min_split_bytes": 0}),
]


@pytest.mark.sampled()
@pytest.mark.parametrize("fault", ["behind the last batch", "in the first step"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_result_is_that_of_one_process_though_a_member_is_killed(
    cluster: LocalCluster, strategy: tuple[str, Mapping[str, Any]], fault: str
) -> None:
    name, options = strategy
    run = elastic(cluster, "ends", desired_members=3, strategy=name, options=options)
    with Ranks() as ranks:
        runs = [replace(run, member_id=member) for member in "abc"]
        runs[2] = replace(runs[2], fault=fault)
        members = [ranks.start(elastic_bodies.train_to_the_end, each) for each in runs]
        finished = [rank.expect("finished") for rank in members[:2]]
        assert members[2].join() == -signal.SIGKILL
    num_steps = -(-NUM_SAMPLES // run.batch_size) * ENDING_EPOCHS
    expected = one_process(run, num_steps)
    for each in finished:
        assert each["step"] == num_steps
        for key, tensor in expected.items():
            got = torch.tensor(each["weights"][key])
            assert float((got - tensor).abs().max()) < TOLERANCE, key


@pytest.mark.long
def test_a_call_after_the_last_batch_gives_no_earlier_model(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The state goes back to a checkpoint, since there are no copies, but the loop that would train
    on from there is over."""
    run = elastic(
        cluster,
        "goes-back",
        desired_members=2,
        strategy="fsdp",
        options={"copies": 0},
        checkpoints=str(tmp_path),
    )
    with Ranks() as ranks:
        runs = [replace(run, member_id="a"), replace(run, member_id="b")]
        runs[1] = replace(runs[1], fault="behind the last batch")
        survivor, _ = [ranks.start(elastic_bodies.train_to_the_end, each) for each in runs]
        raised = survivor.expect("raised")
    assert raised["error"] == "StateLost"
    assert "hold step 7" in raised["text"]
    assert "state of step 10" in raised["text"]
