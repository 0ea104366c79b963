"""Sessions with compressed gradients: real members, one of which is killed."""

import signal

import pytest
from support.collectives import compression_ranks
from support.processes.ranks import Ranks
from support.training.rank_bodies import NUM_STEPS, Run

from shoal_client.local.cluster import LocalCluster


def run_of(cluster: LocalCluster, compression: str, member_id: str, fault: str = "") -> Run:
    return Run(
        coordinator=cluster.coordinator,
        job=f"compressed-{compression}",
        member_id=member_id,
        min_members=1,
        desired_members=3,
        strategy=compression,
        fault=fault,
    )


@pytest.mark.sampled()
@pytest.mark.parametrize("compression", ["one-bit", "powersgd"])
def test_survivors_of_a_kill_end_with_the_same_weights(
    cluster: LocalCluster, compression: str
) -> None:
    """The killed member's residual is lost; training goes on, and the loss falls."""
    with Ranks() as ranks:
        crew = [
            ranks.start(compression_ranks.train_compressed, run_of(cluster, compression, name, how))
            for name, how in (("a", ""), ("b", ""), ("c", "kill in backward"))
        ]
        finished = [rank.expect("finished") for rank in crew[:2]]
        assert [rank.join() for rank in crew] == [0, 0, -signal.SIGKILL]
    assert [each["step"] for each in finished] == [NUM_STEPS] * 2
    assert finished[0]["checksum"] == finished[1]["checksum"]
    for each in finished:
        assert sum(each["losses"][-5:]) < 0.8 * sum(each["losses"][:5])
        assert each["metrics"]["bytes_per_step"] > 0
    sizes = {data["world_size"] for kind, data in crew[0].seen if kind == "committed"}
    assert sizes == {2, 3}


@pytest.mark.long
def test_members_with_different_compressions_are_refused(cluster: LocalCluster) -> None:
    with Ranks() as ranks:
        job = "compressed-apart"
        runs = [run_of(cluster, name, name[0]) for name in ("fp16", "top-k")]
        members = [
            ranks.start(
                compression_ranks.train_compressed,
                Run(**{**vars(run), "job": job, "desired_members": 2, "min_members": 2}),
            )
            for run in runs
        ]
        raised = [member.expect("raised") for member in members]
        for each in raised:
            assert each["error"] == "ProposalConflict"
            assert "compression" in each["text"]
