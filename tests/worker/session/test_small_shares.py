"""Shares of one sample: BatchNorm cannot train on them, and members are warned in advance."""

import secrets
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from support.members.small_shares import SMALLEST, Norms, train, train_member
from support.processes.ranks import Ranks

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order, SamplePosition
from shoal.data.share_sizes import ShareSizes
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

WARNING = "batchnorm_of_one_sample"


def warnings_of(session_of: Any) -> list[dict[str, Any]]:
    with structlog.testing.capture_logs() as logs:
        session_of()
    return [each for each in logs if each["event"] == WARNING]


@pytest.mark.parametrize(
    ("kind", "options", "is_told"),
    [
        ("flat", {}, True),
        ("flat", {"drop_last": True}, False),
        ("flat", {"max_members": 1}, False),
        ("image", {}, False),
        ("pixel", {}, True),
        ("frozen", {}, False),
        ("flat", {"sync_batchnorm": True}, False),
    ],
)
def test_members_are_warned_at_the_beginning(
    cluster: LocalCluster, kind: str, options: dict[str, Any], is_told: bool
) -> None:
    """The warning is about layers with one value per sample and channel; images have many."""
    job = f"small-{secrets.token_hex(4)}"
    options = {"max_members": 3, **options}
    found = warnings_of(lambda: train(cluster.coordinator, job, kind, num_steps=1, **options))
    assert len(found) == int(is_told)
    for warning in found:
        assert (warning["members"], warning["batch"]) == (SMALLEST // 2 + 1, SMALLEST)
        assert "drop_last=True" in warning["hint"]
        assert "sync_batchnorm=True" in warning["hint"]
        assert "--max" in warning["hint"]


def test_the_smallest_batch_follows_a_change_of_the_batch_size() -> None:
    """The epoch's samples after the change are divided again."""
    loader = Loader((torch.zeros(20),), Order(num_samples=20, global_batch_size=6, num_epochs=2))
    sizes = ShareSizes(lambda: loader.order, 4)
    assert sizes.smallest_batch == 2
    loader.begin_at(SamplePosition(step=1, epoch=0, offset=7))
    assert sizes.smallest_batch == 1
    loader.begin_at(SamplePosition(step=4, epoch=1, offset=5))
    assert sizes.smallest_batch == 3


def test_an_error_of_batchnorm_names_the_remedies(cluster: LocalCluster) -> None:
    """torch's own error names only sizes."""
    model = Norms("flat")
    text = r"single sample, in step 0.*drop_last=True.*global_batch_size.*sync_batchnorm=True"
    with (
        pytest.raises(InvalidSpec, match=text) as raised,
        shoal.join(f"small-{secrets.token_hex(4)}", coordinator=cluster.coordinator) as session,
    ):
        model, _ = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.batches(torch.randn(4, 3), global_batch_size=1):
            with session.step():
                session.backward(model(batch.inputs).square().mean())
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_newcomer_too_many_does_not_end_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    """The members that know of the limit refuse it, and they train to the end."""
    job, gate = f"small-{secrets.token_hex(4)}", str(tmp_path / "gate")
    with Ranks() as ranks:
        first = ranks.start(train_member, cluster.coordinator, job, gate)
        first.expect("stepped")
        second = ranks.start(train_member, cluster.coordinator, job, gate)
        refused = second.expect("raised")
        assert refused["error"] == "ProposalConflict", refused
        assert "world_size" in refused["text"]
        assert "at most 1: BatchNorm needs 2 samples" in refused["text"]
        Path(gate).touch()
        assert first.expect("finished")["steps"] > 3
