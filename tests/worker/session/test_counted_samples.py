"""Steps in which a member has no samples: its batch counts none."""

from typing import Any

import pytest
import torch
from support.members.thread_members import ThreadJob
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import shoal
from shoal.randomness import sample_generator
from shoal_client.local.cluster import LocalCluster

NUM_SAMPLES, NUM_MEMBERS = 5, 3
"""Numbers that leave one member without samples in the second step, if a step has three samples."""


class Skipping(nn.Module):
    """A model that skips its inner layer at random, and counts the samples that it has seen."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 1), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.drawn: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        self.drawn.append(float(torch.rand((), generator=sample_generator())))
        outputs: Tensor = self.outer(self.inner(inputs) if self.drawn[-1] < 0.5 else inputs)
        return outputs


def members(cluster: LocalCluster, strategy: Any, *, in_one_call: bool) -> list[dict[str, Any]]:
    """Return, by rank, what each member saw in the second step."""
    job = ThreadJob(cluster=cluster, num_members=NUM_MEMBERS)
    inputs = torch.arange(float(NUM_SAMPLES))[:, None]
    torch.manual_seed(0)
    weights = Skipping().state_dict()

    def member() -> dict[str, Any]:
        model: Any = Skipping()
        model.load_state_dict(weights)
        given = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found: dict[str, Any] = {}
        with job.join() as session:
            model, optimizer = session.distribute(model, optimizer, strategy=strategy())
            for batch in session.batches(
                (inputs, inputs), global_batch_size=NUM_MEMBERS, shuffle=False
            ):
                with session.step() as step:
                    if in_one_call:
                        loss = session.forward_backward(batch, mse_loss)
                    else:
                        loss = mse_loss(model(batch.inputs), batch.targets)
                        session.backward(loss)
                    session.log({"loss": loss, "batch": batch.step})
                found = {
                    "rank": session.rank,
                    "loss": float(loss.detach()),
                    "step loss": float(step.loss),  # type: ignore[arg-type]
                    "samples": batch.num_samples,
                    "inputs": batch.inputs.tolist(),
                    "drawn": given.drawn[-1],
                    "seen": float(given.seen),
                    "logged": session._controller.job_log._newest["batch"][1],
                }
        return found

    return sorted(job.results(member), key=lambda found: found["rank"])


@pytest.mark.sampled()
@pytest.mark.parametrize("in_one_call", [False, True], ids=["backward", "forward_backward"])
@pytest.mark.parametrize("strategy", ["ddp", "local-sgd"])
def test_a_member_without_samples_counts_none(
    cluster: LocalCluster, strategy: str, in_one_call: bool
) -> None:
    """The member repeats the first sample of the step, with the same random numbers. Its loss of
    the step is NaN, and it logs nothing."""

    def made() -> Any:
        if strategy == "ddp":
            return shoal.DDP(find_unused_parameters=True)
        return shoal.LocalSGD(every_steps=99)

    found = members(cluster, made, in_one_call=in_one_call)
    assert [each["samples"] for each in found] == [1, 1, 0]
    assert [each["inputs"] for each in found] == [[[3.0]], [[4.0]], [[3.0]]]
    assert [each["logged"] for each in found] == [1, 1, 0]
    assert found[2]["step loss"] != found[2]["step loss"], "NaN"
    assert not in_one_call or found[2]["loss"] == 0
    assert found[2]["drawn"] == found[0]["drawn"]
    if strategy == "local-sgd":
        assert [each["seen"] for each in found] == [2, 2, 1]


def test_a_part_without_samples_logs_nothing() -> None:
    """Such parts come last: their values would replace those of the member's samples."""
    logged = []
    model: Any = Skipping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(9.0)[:, None]
    with shoal.join() as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=shoal.DDP(find_unused_parameters=True)
        )
        for batch in session.batches((inputs, inputs), global_batch_size=8, shuffle=False):
            with session.step():
                for part in batch.parts(4):
                    session.backward(mse_loss(model(part.inputs), part.targets))
                    session.log({"stand_in": float(part.is_stand_in)})
            logged.append(session._controller.job_log._newest["stand_in"])
    assert [value for _, value in logged] == [0.0, 0.0]
