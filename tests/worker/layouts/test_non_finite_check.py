"""A gradient that is not finite on one rank of a mesh: all ranks stop in the same step."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import tensor_models as models
from support.processes.worlds import LaidOutTraining, Training, this_world
from support.training.elastic_bodies import Explodes
from torch import Tensor
from torch.distributed.tensor import DTensor

import shoal
from shoal.backends.process_group.collectives import counts, reset_counts
from shoal.layouts.base import Layout
from shoal.layouts.clipping import clip
from shoal.layouts.gradients import name_of_fault
from shoal.layouts.sharded import nan_propagating_reduce_scatter
from shoal.model.gradients import are_finite
from shoal.strategies.layout.fsdp_tensor import FSDPTensor
from shoal.strategies.layout.hybrid import Hybrid
from shoal.strategies.layout.pipeline import Pipeline
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.strategies.layout.tensor import TensorParallel
from shoal_proto.errors import GenerationBroken, NonFiniteGradient

STEP = 4
PLACES = ("cuda", "cpu")
ARRANGEMENTS: dict[str, tuple[int, ShardedStrategy]] = {
    "tensor": (2, TensorParallel(min_split_bytes=0)),
    "pipeline": (3, Pipeline(microbatches=2)),
    "stages and copies": (4, Hybrid(pipeline=2, data=2, tensor=1, microbatches=2)),
    "stages and splits": (4, Hybrid(pipeline=2, tensor=2, min_split_bytes=0, microbatches=2)),
    "copies and splits": (4, Hybrid(pipeline=1, data=2, tensor=2, min_split_bytes=0)),
}


def after_backward(strategy: ShardedStrategy, model: Any = models.gpt) -> Layout:
    """Return the layout of this rank, which has its own gradients of a step."""
    world = this_world()
    training = Training(
        model=model, optimizer=models.momentum, data=models.tokens, loss=models.next_token
    )
    layout = LaidOutTraining(training, strategy.lay_out, world).layout
    layout.step = STEP
    layout.begin()
    layout.forward_backward(*training.batch(0), training.loss, 1.0)
    return layout


def gradients(layout: Layout) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients."""
    found: dict[str, Any] = {name: p.grad for name, p in layout.parameters.items()}
    return {
        name: grad.to_local() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
        if grad is not None
    }


def raised_by(layout: Layout) -> str:
    """Return the error that the check raises, as text."""
    try:
        layout.check()
    except (NonFiniteGradient, GenerationBroken) as error:
        assert f"at step {STEP}" in str(error)
        return f"{type(error).__name__}: {error}"
    return ""


def one_fault(strategy: ShardedStrategy, faulty: int, *, clips: bool) -> str:
    """Return the check's error if rank `faulty` has an infinity in the last of its gradients."""
    layout = after_backward(strategy)
    if dist.get_rank() == faulty:
        list(gradients(layout).values())[-1].view(-1)[0] = torch.inf
    layout.reduce()
    if clips:
        clip(layout, 1.0)
    return raised_by(layout)


@pytest.mark.sampled()
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_non_finite_gradient_of_any_rank_is_an_error_on_all(name: str, clips: bool) -> None:
    """Regression: ranks that did not see the fault took the step."""
    world_size, strategy = ARRANGEMENTS[name]
    for faulty in (0, world_size - 1):
        errors = shoal.run_in_memory(
            functools.partial(one_fault, strategy, faulty, clips=clips), world_size
        )
        for rank, each in enumerate(errors):
            expected = "NonFiniteGradient" if rank == faulty else "GenerationBroken"
            assert each.startswith(expected), (faulty, errors)
        others = [each for rank, each in enumerate(errors) if rank != faulty]
        assert all(f"rank {faulty} is not finite" in each for each in others)


def exploded(faulty: frozenset[int]) -> str:
    """Return the check's error after a backward pass in which the gradients of these ranks are not
    finite, though their losses are."""
    training = Training(
        model=models.gpt, optimizer=models.momentum, data=models.tokens, loss=models.next_token
    )
    strategy = FSDPTensor(tensor=2, min_split_bytes=0)
    layout = LaidOutTraining(training, strategy.lay_out, this_world()).layout
    layout.step = STEP
    layout.begin()
    inputs, targets = training.batch(0)
    outputs = layout.module(inputs)
    function: Any = Explodes
    if dist.get_rank() in faulty:
        outputs = function.apply(outputs)
    layout.backward(training.loss(outputs, targets), 1.0)
    layout.reduce()
    return raised_by(layout)


@pytest.mark.parametrize("is_on_host", [True, False], ids=["host", "device"])
def test_gradients_that_a_backward_pass_reduces_are_traced_to_their_ranks(
    monkeypatch: pytest.MonkeyPatch, is_on_host: bool
) -> None:
    """A tensor group computes one loss. On a device the ranks at fault were taken for ranks with
    finite gradients whose sum had overflowed."""
    monkeypatch.setattr(nan_propagating_reduce_scatter, "is_on_host", lambda _: is_on_host)
    errors = shoal.run_in_memory(functools.partial(exploded, frozenset({2, 3})), 4)
    for rank, error in enumerate(errors):
        if rank in (2, 3):
            assert error.startswith("NonFiniteGradient: the gradient of ")
        else:
            assert error.startswith("GenerationBroken: the gradients of ranks 2, 3 are not finite")


def messages(strategy: ShardedStrategy, *, clips: bool) -> tuple[str, int]:
    layout = after_backward(strategy)
    layout.reduce()
    reset_counts()
    if clips:
        clip(layout, 1.0)
    error = raised_by(layout)
    return error, sum(count.calls for count in counts().values())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_check_takes_one_message_also_if_gradients_are_clipped(name: str, clips: bool) -> None:
    world_size, strategy = ARRANGEMENTS[name]
    body = functools.partial(messages, strategy, clips=clips)
    assert shoal.run_in_memory(body, world_size) == [("", 1)] * world_size


def told_elsewhere(strategy: ShardedStrategy, faulty: int) -> tuple[str, int]:
    """Return the check's error, and the number of calls, if another message has carried the
    findings of each rank."""
    layout = after_backward(strategy)
    check = layout.non_finite_check
    assert layout.faults_are_own
    assert check is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == faulty:
        list(gradients(layout).values())[-1].view(-1)[0] = torch.inf
    check.scan(layout.parameters)
    assert check.is_own is (rank == faulty)
    check.note_faults([each == faulty for each in range(world_size)])
    layout.reduce()
    reset_counts()
    return raised_by(layout), sum(count.calls for count in counts().values())


@pytest.mark.parametrize("faulty", [0, 1])
@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_faults_that_another_message_has_carried_take_no_further_message(
    name: str, faulty: int
) -> None:
    world_size, strategy = ARRANGEMENTS[name]
    errors = shoal.run_in_memory(functools.partial(told_elsewhere, strategy, faulty), world_size)
    for rank, (text, num_messages) in enumerate(errors):
        assert text.startswith("NonFiniteGradient" if rank == faulty else "GenerationBroken")
        assert not num_messages


def test_stages_with_a_common_parameter_check_its_summed_gradient() -> None:
    layouts = shoal.run_in_memory(
        lambda: after_backward(Pipeline(microbatches=2), models.tied_gpt).faults_are_own, 3
    )
    assert layouts == [False] * 3


def too_large_together(strategy: ShardedStrategy, shared: str) -> str:
    """Return the check's error if the gradients of two ranks are finite and their sum is not."""
    layout = after_backward(strategy, models.tied_gpt)
    if shared in layout.parameters:
        gradients(layout)[shared].fill_(torch.finfo(torch.float32).max)
    layout.reduce()
    return raised_by(layout)


def test_a_sum_that_overflows_in_two_stages_is_an_error_on_the_stage_between_too() -> None:
    """The first and the last of three stages use one parameter."""
    holder = shoal.run_in_memory(
        lambda: list(after_backward(Pipeline(microbatches=2), models.tied_gpt).parameters), 3
    )
    (shared,) = set(holder[0]) & set(holder[2])
    assert shared not in holder[1]
    body = functools.partial(too_large_together, Pipeline(microbatches=2), shared)
    for each in shoal.run_in_memory(body, 3):
        assert each.startswith("NonFiniteGradient: the sum of all members' gradients")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_of_a_model_on_several_devices_are_examined() -> None:
    parameters = {place: torch.nn.Parameter(torch.ones(3, device=place)) for place in PLACES}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    assert name_of_fault(parameters) == ""
    for place, parameter in parameters.items():
        parameter.grad = torch.full_like(parameter, torch.nan)
        assert name_of_fault(parameters) == place
        assert not are_finite([each.grad for each in parameters.values() if each.grad is not None])
        parameter.grad = torch.ones_like(parameter)
    assert are_finite([each.grad for each in parameters.values() if each.grad is not None])


def test_the_error_of_a_lone_rank_is_about_the_gradient_of_a_parameter() -> None:
    (error,) = shoal.run_in_memory(
        functools.partial(one_fault, TensorParallel(min_split_bytes=0), 0, clips=False), 1
    )
    assert error.startswith("NonFiniteGradient: the gradient of ")
