"""Members that differ are refused with the first entry that differs, named as in the script."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import ProposalConflict

SAMPLES = (torch.randn(40, 3), torch.randn(40, 1))
Given = tuple[nn.Module, torch.optim.Optimizer]


def heads(*names: str) -> Given:
    model = nn.ModuleDict({name: nn.Linear(3, 1) for name in names})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_buffer(size: int) -> Given:
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(size))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def in_groups(rates: list[float]) -> Given:
    """A model with many parameters, each in a group of its own, as with rates that fall from layer
    to layer."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in rates))
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    return model, torch.optim.AdamW(groups)


RATES = [0.1 * 0.9**n for n in range(60)]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (
            partial(heads, "alpha", "beta"),
            partial(heads, "beta", "alpha"),
            [
                "'parameter alpha.weight: (1, 3) float32 (same entries in another order)' in one",
                "'parameter beta.weight: (1, 3) float32 (same entries in another order)' in other",
                "Do not iterate over a set",
            ],
        ),
        (
            partial(heads, "dense"),
            partial(heads, "dense_2"),
            ["'parameter dense.weight: ", "'parameter dense_2.weight: ", "give the layers names"],
        ),
        (
            partial(with_buffer, 4),
            partial(with_buffer, 5),
            ["'buffer seen: (4,) float32' in one", "'buffer seen: (5,) float32' in other"],
        ),
        (
            partial(in_groups, RATES),
            partial(in_groups, [*RATES[:50], 0.5, *RATES[51:]]),
            [f"'group 50 lr: {RATES[50]}' in one", "'group 50 lr: 0.5' in other"],
        ),
    ],
    ids=["order", "name", "buffer", "rate"],
)
def test_the_first_entry_that_differs_is_named(
    cluster: LocalCluster,
    one: Callable[[], Given],
    other: Callable[[], Given],
    expected: list[str],
    request: pytest.FixtureRequest,
) -> None:
    """The entries differ in order, as from a set, in a name, in a buffer's shape, or in a setting
    of one group of many."""
    job = f"differ-{request.node.callspec.id}"
    with shoal.join(job, coordinator=cluster.coordinator, member_id="one") as session:
        session.distribute(*one())
        next(session.batches(SAMPLES, global_batch_size=20))
        with (
            pytest.raises(ProposalConflict) as refused,
            shoal.join(job, coordinator=cluster.coordinator, member_id="other") as stranger,
        ):
            stranger.distribute(*other())
            next(stranger.batches(SAMPLES, global_batch_size=20))
    for text in expected:
        assert text in str(refused.value)


def test_an_optimizer_of_many_groups_is_proposed(cluster: LocalCluster) -> None:
    """The optimizer's settings have more characters than a field of a proposal may have."""
    model, optimizer = in_groups(RATES)
    with shoal.join("groups", coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(torch.randn(40, 1), global_batch_size=20):
            with session.step():
                session.backward(model(batch.inputs).square().mean())
        assert session.step_number == 2


@pytest.mark.parametrize("other", ["none", "every 10 steps"])
def test_members_without_the_same_checkpoints_are_refused(
    cluster: LocalCluster, tmp_path: Path, other: str
) -> None:
    """Members read and write checkpoints together. Otherwise the bring-up or a later checkpoint
    would wait for a member that takes no part."""
    job = f"checkpoints-{other.replace(' ', '-')}"
    kept = shoal.Checkpoints(tmp_path, every_steps=5)
    others = None if other == "none" else shoal.Checkpoints(tmp_path, every_steps=10)
    with shoal.join(job, coordinator=cluster.coordinator, member_id="one") as session:
        session.distribute(*heads("dense"), checkpoints=kept)
        next(session.batches(SAMPLES, global_batch_size=20))
        with (
            pytest.raises(ProposalConflict) as refused,
            shoal.join(job, coordinator=cluster.coordinator, member_id="other") as stranger,
        ):
            stranger.distribute(*heads("dense"), checkpoints=others)
            next(stranger.batches(SAMPLES, global_batch_size=20))
    for text in ("checkpoints: ", "'every 5 steps' in one", f"'{other}' in other"):
        assert text in str(refused.value)
