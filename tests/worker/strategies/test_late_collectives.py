"""Training over groups like NCCL's, whose collectives are done before they have delivered anything.

`support.collectives.late_groups` describes them: a read that does not wait for the work returns the
previous contents.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.collectives.late_groups import LateRunGroup, late_groups
from support.collectives.strategy_runs import (
    Run,
    StepOptions,
    by_a_rank,
    difference,
    enter,
    entered,
    take_step,
    weights_of,
)
from support.models import tensor_models, tied_models
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.membership.generation import Generation
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import GenerationBroken


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4))
    draw_parameters(model, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    # a small size, for several buckets
    "ddp": partial(shoal.DDP, bucket_mb=1e-4),
    "zero1": partial(shoal.Zero1, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, min_group_bytes=100, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
    "pipeline": partial(shoal.Pipeline, copies=0),
    "local-sgd": partial(shoal.LocalSGD, every_steps=2),
    "local-sgd with int8": partial(shoal.LocalSGD, every_steps=2, compression="int8"),
    "diloco": partial(shoal.DiLoCo, every_steps=2),
    **{
        f"ddp with {name}": partial(shoal.DDP, bucket_mb=1e-4, compression=name)
        for name in ("fp16", "int8", "one-bit", "top-k", "powersgd")
    },
}


OF_FOUR: Mapping[str, Callable[[], Strategy]] = {
    "hsdp": partial(shoal.HSDP, shard=2, min_group_bytes=100, copies=0),
    "fsdp-tensor": partial(
        shoal.FSDPTensor, tensor=2, min_split_bytes=0, min_group_bytes=100, copies=0
    ),
    "hybrid": partial(shoal.Hybrid, tensor=2, pipeline=2, min_split_bytes=0, copies=0),
    "diloco": partial(shoal.DiLoCo, every_steps=2),
}
CLIPPED = [name for name in STRATEGIES if not name.startswith(("local-sgd", "diloco"))]


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "clips"),
    [*((name, False) for name in STRATEGIES), *((name, True) for name in CLIPPED)],
)
def test_nothing_is_read_before_it_has_arrived(strategy: str, clips: bool) -> None:
    """The weights are bit for bit those of a group whose collectives end when they are done."""
    run = Run(
        build=build,
        loader=equality.loader,
        loss=equality.loss,
        num_steps=8,
        step_options=StepOptions(max_norm=0.1) if clips else StepOptions(),
    )
    expected = run_in_memory(by_a_rank, 2, run, STRATEGIES[strategy])
    with late_groups():
        late = run_in_memory(by_a_rank, 2, run, STRATEGIES[strategy])
    for ours, theirs in zip(late, expected, strict=True):
        assert difference(ours, theirs) == 0


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", OF_FOUR)
def test_nothing_is_read_before_it_has_arrived_in_groups_of_some_ranks(strategy: str) -> None:
    """The groups are the ranks of a copy, of the same rows and of a layer, and neighbouring
    stages."""
    run = Run(build=build, loader=equality.loader, loss=equality.loss, num_steps=4)
    expected = run_in_memory(by_a_rank, 4, run, OF_FOUR[strategy])
    with late_groups():
        late = run_in_memory(by_a_rank, 4, run, OF_FOUR[strategy], timeout_s=20.0)
    for ours, theirs in zip(late, expected, strict=True):
        assert difference(ours, theirs) == 0


_making = threading.Lock()


def _tied(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model of one rank after the other, since ranks share torch's generator."""
    with _making:
        return tied_models.knotted(seed)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_that_share_a_weight_do_not_wait_for_each_other(schedule: str) -> None:
    """Stages both send their part of the gradient; a send completes only when the other stage
    receives it."""
    run = Run(
        build=_tied,
        loader=tied_models.loader,
        loss=tensor_models.next_token,
        num_steps=2,
    )
    made = partial(shoal.Pipeline, microbatches=2, schedule=schedule, copies=0)
    expected = run_in_memory(by_a_rank, 2, run, made)
    with late_groups():
        late = run_in_memory(by_a_rank, 2, run, made, timeout_s=10.0)
    for ours, theirs in zip(late, expected, strict=True):
        assert difference(ours, theirs) == 0


def steps_of_a_cut_member(strategy: SynchronousStrategy, where: str) -> tuple[int, bool]:
    """Return the number of steps committed by a rank whose group is cut in the second step, on rank
    0; and True if the rank then has a state to offer."""
    run = Run(build=build, loader=equality.loader, loss=equality.loss)
    group, armed = LateRunGroup(), [False]

    def cut(*_: object) -> None:
        if armed[0] and dist.get_rank() == 0:
            group.cut("the test said so")

    def loss_function(outputs: Tensor, targets: Tensor) -> Tensor:
        if where == "in the passes":
            cut()
        return equality.loss(outputs, targets)

    rank = enter(run, strategy, group)
    if where == "in the update":
        rank.optimizer.register_step_post_hook(cut)
    batches = equality.loader()
    take_step(strategy, batches.synchronous(0, *rank.share), loss_function)
    armed[0] = True
    with contextlib.suppress(GenerationBroken, dist.DistError):
        take_step(strategy, batches.synchronous(1, *rank.share), loss_function)
    return strategy.step, strategy._transaction.snapshot.is_whole


@pytest.mark.parametrize("strategy", ["ddp", "ddp with powersgd", "zero1", "zero2", "fsdp"])
def test_no_step_is_committed_with_half_of_a_collective(strategy: str) -> None:
    """Members all vote for the step, and an aborted message leaves numbers that look valid."""
    with late_groups():
        cut, _ = run_in_memory(
            lambda: steps_of_a_cut_member(STRATEGIES[strategy](), "in the passes"), 2
        )
    assert cut == (1, True)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor"])
def test_contents_of_an_aborted_collective_are_no_fault_of_a_member(strategy: str) -> None:
    """The contents may be anything; a member that took them for a fault of its own would leave its
    job."""
    with late_groups(left=float("nan")):
        cut, _ = run_in_memory(
            lambda: steps_of_a_cut_member(STRATEGIES[strategy](), "in the passes"), 2
        )
    assert cut == (1, True)


def test_a_member_that_is_cut_within_an_update_offers_no_state() -> None:
    """ZeRO-1 sends each owner's updates after the update."""
    with late_groups():
        cut, other = run_in_memory(
            lambda: steps_of_a_cut_member(STRATEGIES["zero1"](), "in the update"), 2
        )
    assert cut == (1, False)
    assert other == (2, True)


def round_of_a_cut_member(made: Callable[[], Strategy]) -> tuple[int, str, bool]:
    """Run a round of two steps, with the group cut in the second one, on rank 0. Returns the
    step agreed on last, the error at the round's end, and True if the rank then has its initial
    weights."""
    run = Run(build=build, loader=equality.loader, loss=equality.loss)
    group, armed, strategy, raised = LateRunGroup(), [False], made(), ""
    assert isinstance(strategy, shoal.LocalSGD)

    def loss_function(outputs: Tensor, targets: Tensor) -> Tensor:
        if armed[0] and dist.get_rank() == 0:
            group.cut("the test said so")
        return equality.loss(outputs, targets)

    share, batches = entered(run, strategy, group), equality.loader()
    first = weights_of(strategy)
    take_step(strategy, batches.synchronous(0, *share), loss_function)
    armed[0] = True
    try:
        take_step(strategy, batches.synchronous(1, *share), loss_function)
    except (GenerationBroken, dist.DistError) as error:
        raised = type(error).__name__
        strategy.abandon()
    weights = dict(strategy.module.state_dict())
    return strategy.step, raised, difference(weights, first) == 0


@pytest.mark.parametrize("left", [0.0, float("nan")], ids=["numbers", "nan"])
@pytest.mark.parametrize("strategy", ["local-sgd", "local-sgd with int8", "diloco"])
def test_no_round_is_agreed_on_with_half_of_a_mean(strategy: str, left: float) -> None:
    """Members with the same agreed step send each other no state: they would differ for good."""
    with late_groups(left):
        cut, other = run_in_memory(lambda: round_of_a_cut_member(STRATEGIES[strategy]), 2)
    assert cut == (0, "GenerationBroken", True)
    assert other == (2, "", False)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "diloco"])
def test_a_bring_up_that_was_cut_on_the_device_brings_no_state(strategy: str) -> None:
    """The last message of the bring-up goes over the host, and may arrive before the contents of
    the device."""

    def body() -> bool:
        made, group = STRATEGIES[strategy](), LateRunGroup()
        assert isinstance(made, SynchronousStrategy)
        plain = made._bring_up

        def bring_up(generation: Generation, process_group: dist.ProcessGroup) -> None:
            plain(generation, process_group)
            group.cut("the test said so")

        made._bring_up = bring_up  # type: ignore[method-assign]
        with pytest.raises(GenerationBroken):
            entered(Run(build=build, loader=equality.loader, loss=equality.loss), made, group)
        return made.has_state

    with late_groups():
        assert run_in_memory(body, 2) == [False, False]
