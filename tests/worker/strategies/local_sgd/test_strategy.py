"""Local SGD and DiLoCo: the same as replicas that one process steps one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import (
    PLAIN,
    DefaultGroup,
    StepOptions,
    generation_of,
    take_step,
    use_group,
)
from support.oracles.local_sgd_twin import Twin, build, loader, strategy_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.backends.in_memory.run import run_in_memory
from shoal.checkpoint.background import Checkpoints
from shoal.membership.generation import Generation
from shoal.strategies import find_strategy
from shoal.strategies.local_sgd.strategy import DiLoCo, LocalSGD
from shoal.strategies.outer_step import OuterStep
from shoal_proto.errors import (
    DtypeMismatch,
    GenerationBroken,
    InvalidSpec,
    NonFiniteGradient,
    UnsupportedOptimizer,
)
from shoal_proto.v1 import membership_pb2 as pb

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""


@dataclass
class Member:
    """A member over all its generations."""

    name: str
    strategy: LocalSGD
    model: nn.Module
    optimizer: torch.optim.Optimizer
    acknowledged: list[int] = field(default_factory=list)

    def train(
        self,
        generation: Generation,
        stop: int,
        batch_size: int = 10,
        step_options: StepOptions = PLAIN,
    ) -> None:
        """Enter the generation and train up to step `stop`."""
        strategy, batches = self.strategy, loader(batch_size)
        strategy.enter(generation)
        while strategy.step < stop:
            step = strategy.step
            batch = batches.synchronous(step, generation.rank, generation.world_size)
            acknowledged = partial(self.acknowledged.append, step)
            take_step(strategy, batch, nn.functional.cross_entropy, step_options, acknowledged)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}


def member_of(name: str, strategy: str, optimizer: str, every_steps: int, **options: Any) -> Member:
    """Return a member with weights of its own, in the group of the surrounding run."""
    made = strategy_of(strategy, every_steps, **options)
    use_group(made)
    model, own = build(optimizer, seed=ord(name))
    made.distribute(model, own)
    return Member(name, made, model, own)


def among(members: Sequence[Member], me: Member, number: int, keeping: str = "") -> Generation:
    """Return the generation of these members as seen by `me`. Members in `keeping` have state."""
    states = dict.fromkeys(keeping, pb.STATE_ACTION_KEEP)
    return generation_of([member.name for member in members], me.name, number, states)


def together(members: Sequence[Member], stop: int, ending: str = "finish", **options: Any) -> None:
    """Run one generation of these members, by rank, up to step `stop`; then "finish", "hand over"
    or "break"."""
    number = options.pop("number", 1)
    keeping = options.pop("keeping", "")

    def body() -> None:
        me = members[dist.get_rank()]
        me.train(among(members, me, number, keeping), stop, **options)
        if ending == "finish":
            me.strategy.finish()
        elif ending == "hand over":
            me.strategy.hand_over()
        me.strategy.abandon()

    run_in_memory(body, len(members))


def check(members: Sequence[Member], twin: Twin) -> None:
    expected = twin.weights()
    for member in members:
        for name, tensor in member.weights().items():
            # Infinities are equal, and far from everything else.
            assert torch.allclose(tensor, expected[name], rtol=0, atol=TOLERANCE), name


def members_of(names: str, *arguments: Any, **options: Any) -> list[Member]:
    return [member_of(name, *arguments, **options) for name in names]


def twin_of(names: str, strategy: str, optimizer: str, **options: Any) -> Twin:
    """Return a twin in which all replicas start like the first one."""
    twin = Twin(strategy, optimizer, seed=ord(names[0]), **options)
    for name in names:
        twin.joins(name)
    return twin


OPTIONS_OF_STEPS = {
    "clipped": StepOptions(passes=(1, 1, 1, 1, 2), max_norm=0.1),
    "bf16": StepOptions(autocast=torch.bfloat16),
}
CASES = [
    *(("ab", "sgd", "clipped"), ("abc", "sgd", "clipped"), ("abcd", "sgd", "clipped")),
    *(("ab", "adamw", "clipped"), ("abc", "adamw", "clipped"), ("abcd", "adamw", "clipped")),
    *(("ab", "sgd", "bf16"), ("abc", "adamw", "bf16"), ("abcd", "sgd", "bf16")),
]


@pytest.mark.sampled()
@pytest.mark.parametrize(("names", "optimizer", "how"), CASES)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_equal_to_replicas_in_one_process(
    strategy: str, names: str, optimizer: str, how: str
) -> None:
    """The last of the rounds of seven steps has one of the 50. Shares are uneven, and one layer
    gets no gradient. Each replica clips, accumulates and rounds by itself, so bf16 needs no other
    tolerance."""
    step_options = OPTIONS_OF_STEPS[how]
    members = members_of(names, strategy, optimizer, 7)
    together(members, 50, step_options=step_options)
    twin = twin_of(names, strategy, optimizer, step_options=step_options)
    for start in range(0, 50, 7):
        twin.train(names, start, min(start + 7, 50))
    check(members, twin)
    assert all(member.acknowledged == list(range(50)) for member in members)


def test_a_step_a_round_with_plain_sgd_is_data_parallel() -> None:
    """The mean of the results of one step, from equal parameters, is that step with the mean
    gradient."""
    members = members_of("abc", "local-sgd", "sgd", 1)
    for member in members:
        member.optimizer.param_groups[0]["momentum"] = 0.0
    together(members, 12)
    model, _ = build("sgd", seed=ord("a"))
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(12):
        batch = loader().synchronous(step, 0, 1)
        plain.zero_grad()
        nn.functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        plain.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(members[1].model.get_parameter(name), parameter, atol=TOLERANCE)


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_members_without_a_sample_stay_where_they_are(strategy: str) -> None:
    """Members without samples, in batches of two for three members, have no part in the average,
    and their momentum does not change."""
    members = members_of("abc", strategy, "sgd", 4)
    together(members, 10, batch_size=2)
    twin = twin_of("abc", strategy, "sgd", batch_size=2)
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        twin.train("abc", start, stop)
    check(members, twin)
    assert not members[2].optimizer.state


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_broken_round_is_trained_again_from_its_start(strategy: str) -> None:
    """The survivors' optimizers, velocity and running statistics go back too; nothing counts
    twice."""
    members = members_of("abc", strategy, "adamw", 5)
    together(members, 13, "break")
    assert [member.strategy.step for member in members] == [10] * 3
    assert members[0].acknowledged == list(range(10))
    together(members[1:], 20, number=2, keeping="bc")
    twin = twin_of("abc", strategy, "adamw")
    for start in (0, 5):
        twin.train("abc", start, start + 5)
    for start in (10, 15):
        twin.train("bc", start, start + 5)
    check(members[1:], twin)
    assert members[1].acknowledged == list(range(20))


def test_a_step_that_fails_halfway_leaves_no_trace() -> None:
    """Holds though the round has just begun."""
    members = members_of("a", "local-sgd", "sgd", 5)
    together(members, 5)
    before = members[0].weights()

    def body() -> None:
        me = members[0]
        me.strategy.enter(among(members, me, 2, keeping="a"))
        me.strategy.begin_step()
        batch = loader().synchronous(5, 0, 1)
        me.strategy.backward(me.model(batch.inputs).sum(), batch.weight)
        me.optimizer.step()
        me.strategy.abandon()

    run_in_memory(body, 1)
    assert members[0].strategy.step == 5
    for name, tensor in members[0].weights().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda model: model.register_buffer("late", torch.ones(2)),
            "made its persistent buffer 'late' after distribute",
        ),
        (lambda model: model.to(torch.float64), "the state does not fit the model"),
    ],
)
def test_a_round_that_cannot_be_undone_is_not_trained_again(
    change: Callable[[nn.Module], object], text: str
) -> None:
    """Regression: survivors kept the weights of a broken round, and trained its steps again."""
    members = members_of("a", "local-sgd", "sgd", 5)
    together(members, 5)

    def body() -> None:
        me = members[0]
        me.train(among(members, me, 2, keeping="a"), 7)
        me.strategy.begin_step()
        change(me.model)
        me.strategy.abandon()
        with pytest.raises((InvalidSpec, DtypeMismatch), match=text):
            me.strategy.begin_step()

    run_in_memory(body, 1)


def test_a_buffer_that_is_made_in_a_step_is_refused() -> None:
    """Checkpoints and joiners have no tensor for it."""
    members = members_of("a", "local-sgd", "sgd", 5)

    def body() -> None:
        me = members[0]
        me.strategy.enter(among(members, me, 1))
        me.strategy.begin_step()
        me.model.register_buffer("late", torch.ones(2, dtype=torch.int64))
        batch = loader().synchronous(0, 0, 1)
        me.strategy.backward(me.model(batch.inputs).sum(), batch.weight)
        with pytest.raises(InvalidSpec, match="made its persistent buffer 'late'"):
            me.strategy.end_step(lambda: None)
        assert me.strategy.step == 0

    run_in_memory(body, 1)


class NoMemoryToAgree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which a member runs out of memory when it copies the state agreed on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._foreach_copy_:
            raise torch.OutOfMemoryError("the test said so")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_member_that_fails_to_agree_repeats_the_round_from_its_start(strategy: str) -> None:
    """The velocity goes back too: the repeated round has one outer step."""
    members = members_of("a", strategy, "sgd", 5)
    together(members, 5)

    def body() -> None:
        me = members[0]
        me.train(among(members, me, 2, keeping="a"), 9)
        batch = loader().synchronous(9, 0, 1)
        with NoMemoryToAgree(), pytest.raises(torch.OutOfMemoryError):
            take_step(me.strategy, batch, nn.functional.cross_entropy)
        me.strategy.abandon()

    run_in_memory(body, 1)
    assert members[0].strategy.step == 5
    together(members, 15, number=3, keeping="a")
    twin = twin_of("a", strategy, "sgd")
    for start in (0, 5, 10):
        twin.train("a", start, start + 5)
    check(members, twin)


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_planned_change_ends_the_round_early_and_loses_no_step(strategy: str) -> None:
    """Member c leaves, and member d joins, which continues from the first member's optimizer
    state."""
    members = members_of("abcd", strategy, "adamw", 5)
    together(members[:3], 13, "hand over")
    assert [member.strategy.step for member in members[:3]] == [13] * 3
    together([members[0], members[1], members[3]], 21, number=2, keeping="ab")
    twin = twin_of("abc", strategy, "adamw")
    for start, stop in ((0, 5), (5, 10), (10, 13)):
        twin.train("abc", start, stop)
    twin.joins("d", "a")
    for start, stop in ((13, 15), (15, 20), (20, 21)):
        twin.train("abd", start, stop)
    check([members[0], members[1], members[3]], twin)
    assert members[0].acknowledged == list(range(21))


def test_a_member_that_missed_the_last_round_gets_its_outcome() -> None:
    """Two members had finished the round when the third failed; they all agree on the state."""
    members = members_of("abc", "diloco", "sgd", 5)
    together(members, 5)
    together(members[1:], 10, number=2, keeping="bc")
    together(members, 15, number=3, keeping="abc")
    twin = twin_of("abc", "diloco", "sgd")
    twin.train("abc", 0, 5)
    twin.train("bc", 5, 10)
    twin.joins("a", "b")
    twin.train("abc", 10, 15)
    check(members, twin)


class CutAtStep(DefaultGroup):
    """A group that is aborted once the strategy has taken `step` steps."""

    def __init__(self, strategy: LocalSGD, step: int) -> None:
        self._strategy, self._step = strategy, step

    def check(self) -> None:
        if self._strategy.step == self._step:
            raise GenerationBroken("a collective was aborted", seen="the test said so")


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_member_that_is_cut_off_at_the_end_of_a_round_keeps_its_optimizer_state(
    strategy: str,
) -> None:
    """The round ended on the other member: weights and AdamW's moments are those of an undisturbed
    run."""
    members = members_of("ab", strategy, "adamw", 5)
    use_group(members[1].strategy, CutAtStep(members[1].strategy, 5))

    def body() -> None:
        me = members[dist.get_rank()]
        if me.name == "a":
            me.train(among(members, me, 1), 5)
        else:
            with pytest.raises(GenerationBroken):
                me.train(among(members, me, 1), 5)
        me.strategy.abandon()

    run_in_memory(body, 2)
    assert [member.strategy.step for member in members] == [5, 0]
    use_group(members[1].strategy)
    together(members, 15, number=2, keeping="ab")
    twin = twin_of("ab", strategy, "adamw")
    for start in (0, 5, 10):
        twin.train("ab", start, start + 5)
    check(members, twin)


def test_state_dict_has_the_state_of_the_last_completed_round() -> None:
    """Replicas differ in the middle of a round."""
    members = members_of("ab", "local-sgd", "sgd", 4)
    shown: dict[str, list[Mapping[str, Tensor]]] = {"a": [], "b": []}

    def body() -> None:
        me = members[dist.get_rank()]
        me.train(among(members, me, 1), 6)
        shown[me.name] = [me.strategy.state_dict(), me.weights()]

    run_in_memory(body, 2)
    twin = twin_of("ab", "local-sgd", "sgd")
    twin.train("ab", 0, 4)
    for name, tensor in twin.weights().items():
        for state, _ in shown.values():
            assert torch.allclose(state[name], tensor, rtol=0, atol=TOLERANCE), name
    assert not torch.equal(shown["a"][1]["first.weight"], shown["b"][1]["first.weight"])


@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_a_job_goes_on_from_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    """The checkpoint is written at the end of a round, which ends early for it. Each member resumes
    with the state of the first one's optimizer, and with the velocity."""
    members = members_of("abc", strategy, "adamw", 4)
    for member in members:
        member.strategy.keep_checkpoints(Checkpoints(tmp_path, every_steps=6))
    together(members, 14)
    resumed = members_of("ab", strategy, "adamw", 4)
    for member in resumed:
        member.strategy.keep_checkpoints(Checkpoints(tmp_path, every_steps=100))
    together(resumed, 20)
    twin = twin_of("abc", strategy, "adamw")
    for start, stop in ((0, 4), (4, 6), (6, 8), (8, 12)):
        twin.train("abc", start, stop)
    twin.joins("b", "a")
    for start, stop in ((12, 16), (16, 20)):
        twin.train("ab", start, stop)
    check(resumed, twin)
    assert resumed[0].acknowledged == list(range(12, 20))


def test_compressed_rounds_send_less_and_agree() -> None:
    """fp16 halves the bytes, and all members keep equal weights."""
    members = members_of("ab", "diloco", "sgd", 5, compression="fp16")
    together(members, 20)
    twin = twin_of("ab", "diloco", "sgd")
    for start in range(0, 20, 5):
        twin.train("ab", start, start + 5)
    for name, tensor in members[0].weights().items():
        assert torch.equal(tensor, members[1].model.state_dict()[name]), name
        # One rounding of fp16 in each of four rounds.
        assert torch.allclose(tensor, twin.weights()[name], rtol=0, atol=5e-3), name
    assert members[0].strategy.metrics()["compression_ratio"] > 1.5


def test_a_non_finite_gradient_is_an_error() -> None:
    """The error comes before the optimizer uses the gradient."""
    (member,) = members_of("a", "local-sgd", "sgd", 5)

    def body() -> None:
        strategy = member.strategy
        strategy.enter(among([member], member, 1))
        strategy.begin_step()
        strategy.backward(member.model(torch.ones(2, 6)).sum() * float("nan"), 1.0)
        strategy.end_step(lambda: None)

    with pytest.raises(NonFiniteGradient, match=r"second\.weight|first\.weight"):
        run_in_memory(body, 1)


def test_a_plain_backward_pass_is_refused() -> None:
    """A plain loss.backward() does not know the share of the batch."""
    (member,) = members_of("a", "local-sgd", "sgd", 5)

    def body() -> None:
        member.strategy.enter(among([member], member, 1))
        member.strategy.begin_step()
        member.model(torch.ones(2, 6)).sum().backward()
        member.strategy.end_step(lambda: None)

    with pytest.raises(InvalidSpec, match=r"session\.backward"):
        run_in_memory(body, 1)


def test_half_precision_parameters_are_averaged_in_single() -> None:
    """Members of bf16 models end with the same bits."""
    members = members_of("abc", "diloco", "sgd", 3)
    for member in members:
        member.model.to(torch.bfloat16)
    outcomes: list[Tensor] = []

    def body() -> None:
        me = members[dist.get_rank()]
        strategy = me.strategy
        strategy.enter(among(members, me, 1))
        for _ in range(3):
            strategy.begin_step()
            inputs = torch.full((2, 6), float(dist.get_rank()), dtype=torch.bfloat16)
            strategy.backward(me.model(inputs).float().pow(2).sum(), 1.0)
            strategy.end_step(lambda: None)
        outcomes.append(me.weights()["first.weight"])

    run_in_memory(body, 3)
    assert outcomes[0].dtype == torch.bfloat16
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_options_are_part_of_what_members_agree_on() -> None:
    """Rounds of different lengths would never meet."""
    fields = [
        member_of("a", name, "sgd", steps).strategy.fields()["rounds"]
        for name, steps in (("local-sgd", 5), ("local-sgd", 6), ("diloco", 5))
    ]
    assert len(set(fields)) == 3


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LocalSGD, {"every_steps": 0}),
        (DiLoCo, {"outer_lr": 0.0}),
        (DiLoCo, {"outer_momentum": 1.0}),
        (DiLoCo, {"outer_momentum": 0.0}),
        (LocalSGD, {"compression": "zip"}),
    ],
)
def test_options_out_of_range_are_refused(kind: type[LocalSGD], options: dict[str, Any]) -> None:
    """The refusal comes at construction."""
    with pytest.raises(InvalidSpec):
        kind(**options)


def test_models_and_optimizers_that_cannot_be_trained_are_refused() -> None:
    """LBFGS calls the loss any number of times."""
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
        LocalSGD().distribute(model, torch.optim.LBFGS(model.parameters()))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InvalidSpec, match="nothing to train"):
        DiLoCo().distribute(frozen, torch.optim.SGD(frozen.parameters()))


def test_strategies_are_found_by_name() -> None:
    """Each name has a class of its own."""
    assert type(find_strategy("local-sgd")) is LocalSGD
    assert type(find_strategy("diloco")) is DiLoCo


def test_the_outer_step_is_that_of_torch() -> None:
    """The gradient is -c for a mean change c."""
    for nesterov in (False, True):
        outer = OuterStep(lr=0.3, momentum=0.8, nesterov=nesterov)
        own = torch.zeros(3, dtype=torch.float64)
        theirs = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        reference = torch.optim.SGD([theirs], lr=0.3, momentum=0.8, nesterov=nesterov)
        velocity: Tensor | None = None
        for step in range(5):
            mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (step + 1)
            change, velocity = outer.change(mean, velocity)
            own += change
            theirs.grad = -mean
            reference.step()
        assert torch.allclose(own, theirs)
