"""Plans of local SGD and DiLoCo predict what members then hold and move."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import generation_of, use_group
from support.models.sharded_models import adamw, deep, normed, sgd, training_of
from support.processes.worlds import Training
from torch import Tensor

import shoal
from shoal.backends.process_group.collectives import Count, counts, reset_counts
from shoal.strategies.local_sgd.strategy import DiLoCo, LocalSGD
from shoal.strategies.synchronous.step_vote import NUM_WORDS

EVERY_STEPS = 3


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of the tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def trained(training: Training, kind: type[LocalSGD]) -> dict[str, Any]:
    """Return the bytes that a member holds after its second round, and the traffic of that round's
    steps."""
    strategy = kind(every_steps=EVERY_STEPS)
    model, optimizer = training.build()
    dist.barrier()
    use_group(strategy)
    strategy.distribute(model, optimizer)
    names = [f"m{each}" for each in range(dist.get_world_size())]
    strategy.enter(generation_of(names, names[dist.get_rank()]))
    moved = []
    for step in range(2 * EVERY_STEPS):
        reset_counts()
        strategy.begin_step()
        inputs, targets = training.batch(step)
        strategy.forward_backward(inputs, targets, training.loss, 1.0)
        strategy.end_step(lambda: None)
        moved.append(counts())
    rounds = strategy._outer_loop
    return {
        "parameters": memory(model.parameters()),
        "gradients": memory(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": memory(v for own in optimizer.state.values() for v in own.values()),
        "kept": memory(
            [each.tensor for each in rounds.agreed.shards.values()] + [*rounds._velocity.values()]
        ),
        "moved": moved[EVERY_STEPS:],
    }


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
@pytest.mark.parametrize(("model", "optimizer"), [(deep, adamw), (normed, sgd)])
def test_figures_are_those_of_a_round(model: Any, optimizer: Any, kind: type[LocalSGD]) -> None:
    training = training_of(model, optimizer)
    whole, its_optimizer = training.build()
    plan = shoal.plan(whole, kind(every_steps=EVERY_STEPS), world_size=3, optimizer=its_optimizer)
    for figures, found in zip(
        plan.ranks, shoal.run_in_memory(trained, 3, training, kind), strict=True
    ):
        for name in ("parameters", "gradients", "optimizer", "kept"):
            assert getattr(figures, name) == found[name], name
        *within, last = found["moved"]
        assert within == [{}] * (EVERY_STEPS - 1)
        planned = {each.kind: Count(each.calls, each.num_bytes) for each in figures.collectives}
        of_round = sum(count.bytes for count in planned.values())
        # The plan leaves out the members' vote on the round.
        calls, num_bytes = planned["all_reduce"]
        vote_bytes = len(plan.ranks) * NUM_WORDS * torch.int64.itemsize
        assert last == {**planned, "all_reduce": Count(calls + 1, num_bytes + vote_bytes)}
        assert figures.bytes_per_step == pytest.approx(of_round / EVERY_STEPS)
        assert figures.peak == figures.held


def test_the_table_shows_how_often_members_meet_and_what_they_keep() -> None:
    model = deep()
    optimizer = adamw(model.parameters())
    lines = [
        " ".join(line.split())
        for line in str(shoal.plan(model, "diloco", world_size=2, optimizer=optimizer)).splitlines()
    ]
    assert "rank parameters in a step gradients in backward optimizer kept peak" in lines
    assert any(line.startswith("0-1 all_reduce update, every 100 steps 1 ") for line in lines)
    assert any(line.startswith("0-1 all a step 0.01 ") for line in lines)


def test_compression_is_a_note_of_the_plan_and_not_counted() -> None:
    model = deep()
    for kind in (shoal.DDP, shoal.Zero1, LocalSGD, DiLoCo):
        plain = shoal.plan(model, kind(), world_size=2)
        packed = shoal.plan(model, kind(compression="int8"), world_size=2)
        assert packed.ranks == plain.ranks
        assert "int8" in packed.notes[-1]
