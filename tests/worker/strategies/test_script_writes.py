"""A script's writes to weights and buffers in a step are undone if the step does not happen."""

import secrets
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import Run, enter, entered, weights_of
from support.models import followed_weights
from support.models.small_layers import LimitedRows
from support.processes.ranks import Ranks
from support.training import equality
from support.training.elastic_bodies import Elastic
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.model.local_parts import local_part
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.strategies.rollback.buffers import StepBuffers
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, StateLost

WORLDS = [
    *((name, 2) for name in ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid")),
    *(("hsdp", 4), ("fsdp-tensor", 4)),
]
FREES = {"zero2": (False,), "fsdp": (False, True), "hsdp": (False,), "fsdp-tensor": (False,)}
"""Strategies whose weights are gathered for a pass and then freed; values of `past_count` to
test."""
Writes = Callable[[nn.Module], None]


class WithTeacher(equality.Net):
    """A model with trained weights, and a teacher that follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 7).requires_grad_(False)
        self.layers.append(Cooling())


class Cooling(nn.Module):
    """A layer that replaces its buffer by another tensor, as scripts do."""

    heat: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.ones(1))
        self.register_buffer("unknown", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.heat = self.heat * 0.5
        return inputs * self.heat


def build(seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = WithTeacher()
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def run() -> Run:
    return Run(build=build, loader=equality.loader, loss=equality.loss)


def nothing(_: nn.Module) -> None:
    """Write nothing, like most scripts."""


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Write as sharpness-aware minimisation does between its two passes."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)


@torch.no_grad()
def perturb_together(model: nn.Module) -> None:
    """Write the same by one call, which torch does not count if members have parts."""
    trained = [each for each in model.parameters() if each.requires_grad]
    for is_part in (True, False):
        alike = [each for each in trained if isinstance(each, DTensor) == is_part]
        if alike:
            torch._foreach_add_(alike, 0.1)


def follow(model: nn.Module) -> None:
    """Update a teacher, past torch's count of writes."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data.mul_(0.9)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.clamp_(-0.1, 0.1)


class Member:
    """A rank that takes steps in which the script writes."""

    def __init__(self, name: str, world_size: int, **options: int) -> None:
        strategy = equality.made(name, world_size, **options)()
        assert isinstance(strategy, SynchronousStrategy)
        self.strategy = strategy
        self.shown: nn.Module
        """Model as the script has it."""
        self.shown, self.optimizer, self._share = enter(run(), strategy)[1:]
        self._batches = equality.loader()

    def compute(self, writes: Writes, *, first: bool = False) -> None:
        """Compute a step up to its end."""
        strategy = self.strategy
        batch = self._batches.synchronous(strategy.step, *self._share)
        strategy.begin_step()
        if first:
            writes(self.shown)
        strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
        if not first:
            writes(self.shown)

    def step(self, writes: Writes) -> None:
        self.compute(writes)
        self.strategy.end_step(lambda: None)

    def state(self) -> dict[str, Tensor]:
        return weights_of(self.strategy)


def undone(
    name: str, world_size: int, before: list[Writes], writes: Writes
) -> tuple[dict[str, Tensor], ...]:
    """Return the state before a step that did not happen, and after it."""
    member = Member(name, world_size)
    for each in before:
        member.step(each)
    held = member.state()
    member.compute(writes)
    member.strategy.withdraw_step()
    behind = member.state()
    member.strategy.close()
    return held, behind


@pytest.mark.sampled("strategy", "writes")
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("writes", [perturb, perturb_together, follow, clip, nothing])
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_weights_are_as_before_the_step(
    strategy: str, world_size: int, writes: Writes, num_before: int
) -> None:
    """Holds for the member's very first step, too."""
    case = (strategy, world_size, [writes] * num_before, writes)
    for before, behind in run_in_memory(undone, world_size, *case):
        assert before.keys() == behind.keys()
        assert all(torch.equal(before[key], behind[key]) for key in before)
        # Stages compute each part of a batch separately.
        if strategy != "pipeline":
            assert float(before["layers.7.heat"]) == 0.5**num_before
        else:
            assert float(before["layers.7.heat"]) <= 0.5**num_before


def written_late(name: str, writes: Writes) -> bool:
    """True if a member has state after its first step with writes, which was withdrawn."""
    member = Member(name, 2)
    for _ in range(3):
        member.step(nothing)
    member.compute(writes)
    with pytest.raises(StateLost, match="wrote to for the first time"):
        member.strategy.withdraw_step()
    member.strategy.abandon()
    kept = member.strategy.has_state
    member.strategy.close()
    return kept


@pytest.mark.parametrize("writes", [perturb, follow])
def test_a_member_with_writes_that_cannot_be_undone_has_no_state(writes: Writes) -> None:
    """The script did not write from its first step on: no copy exists from before its first write.
    The member then does not claim to hold the state of the last committed step."""
    assert run_in_memory(written_late, 2, "ddp", writes) == [False, False]


def kept_of_a_failed_update(name: str) -> bool:
    """True if a member has state after its optimizer has failed in the middle of a step."""
    member = Member(name, 2)
    member.step(nothing)
    member.compute(nothing)

    def fail() -> None:
        raise RuntimeError("out of memory")

    member.optimizer.step = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        member.strategy.end_step(lambda: None)
    member.strategy.abandon()
    kept = member.strategy.has_state
    member.strategy.close()
    return kept


def test_weights_of_an_update_that_failed_half_way_are_no_state() -> None:
    """Regression: a member of ddp gave them to others as the state of the last step."""
    assert run_in_memory(kept_of_a_failed_update, 2, "ddp") == [False, False]


def seen_by_peers(name: str, given: Callable[[Any], None], to_optimizer: bool = False) -> bool:
    """True if the copy for peers, made in a step that begins with writes, equals the committed
    state."""
    member = Member(name, 2, copies=1, copy_every_steps=1)
    writes = of_optimizer(member, given) if to_optimizer else given
    for _ in range(3):
        member.step(writes)
    member.strategy.begin_step()
    strategy = member.strategy
    assert isinstance(strategy, ShardedStrategy) and strategy._binding is not None
    committed = {
        name: shard.tensor.clone()
        for name, shard in strategy._collect(strategy._binding).shards.items()
    }
    strategy.withdraw_step()
    member.compute(writes, first=True)
    held = strategy._peer_checkpoints._copies._slots[-1].own_copy
    assert held is not None and held.step == 3
    same = all(held.shards[name].tensor.equal(tensor) for name, tensor in committed.items())
    strategy.withdraw_step()
    strategy.close()
    return same and len(committed) > 3


@pytest.mark.parametrize("writes", [perturb, follow, clip])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_copy_for_peers_has_nothing_of_the_step_in_which_it_is_made(
    strategy: str, writes: Writes
) -> None:
    assert run_in_memory(seen_by_peers, 2, strategy, writes) == [True, True]


def decay(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def decay_anew(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] * 0.5


def restart(optimizer: Optimizer) -> None:
    """Clear the state, as at each cycle of a schedule."""
    optimizer.state.clear()


def of_optimizer(member: Member, writes: Callable[[Optimizer], None]) -> Writes:
    return lambda _: writes(member.optimizer)


def state_of(member: Member) -> list[Tensor]:
    """Return the optimizer's state, in the order of its parameters; one of them is never used."""
    optimizer = member.optimizer
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    assert not optimizer.state.keys() - set(parameters)
    states = [optimizer.state[each] for each in parameters if optimizer.state.get(each)]
    return [local_part(each["momentum_buffer"]).clone() for each in states]


def left_by_undone(
    name: str, world_size: int, writes: Callable[[Optimizer], None], num_before: int
) -> tuple[list[Tensor], ...]:
    """Return the optimizer's state before a step that did not happen, and after it."""
    member = Member(name, world_size)
    on_state = of_optimizer(member, writes)
    for each in [nothing, *[on_state] * num_before]:
        member.step(each)
    held = state_of(member)
    member.compute(on_state)
    member.strategy.withdraw_step()
    behind = state_of(member)
    member.strategy.close()
    return held, behind


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("writes", "num_before"), [(decay, 1), (decay, 4), (decay_anew, 0), (restart, 0)]
)
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_the_optimizers_state_is_as_before_the_step(
    strategy: str, world_size: int, writes: Callable[[Optimizer], None], num_before: int
) -> None:
    case = (strategy, world_size, writes, num_before)
    for before, behind in run_in_memory(left_by_undone, world_size, *case):
        assert before and len(before) == len(behind)
        assert all(map(torch.equal, before, behind))
        assert any(each.any() for each in before)


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_state_that_is_written_to_in_place_for_the_first_time_is_lost_with_the_step(
    strategy: str,
) -> None:
    with pytest.raises(StateLost, match="wrote to for the first time"):
        run_in_memory(left_by_undone, 2, strategy, 2, decay, 0)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
@pytest.mark.parametrize("writes", [decay, decay_anew])
def test_a_copy_for_peers_has_no_state_of_the_step_in_which_it_is_made(
    strategy: str, writes: Callable[[Optimizer], None]
) -> None:
    assert run_in_memory(seen_by_peers, 2, strategy, writes, True) == [True, True]


def replaced(name: str, shape: tuple[int, ...]) -> None:
    member = Member(name, 2)

    def grow(model: nn.Module) -> None:
        model.layers[-1].heat = torch.ones(shape)  # type: ignore[index, union-attr]

    member.step(grow)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_replacing_a_buffer_by_one_of_another_shape_is_refused(strategy: str) -> None:
    with pytest.raises(InvalidSpec, match="another tensor replaced a module's buffer 'heat'"):
        run_in_memory(replaced, 2, strategy, (2,))


def filled(name: str, register: bool) -> None:
    member = Member(name, 2)

    def fill(model: nn.Module) -> None:
        layer: Any = model.layers[-1]  # type: ignore[index]
        if register:
            layer.register_buffer("mean", torch.ones(3))
        else:
            layer.unknown = torch.ones(3)

    member.step(fill)
    if register:
        member.step(nothing)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("register", "name"), [(False, "unknown"), (True, "mean")])
def test_a_buffer_that_is_made_in_a_step_is_refused(
    strategy: str, register: bool, name: str
) -> None:
    """Checkpoints and joiners have no tensor for it."""
    with pytest.raises(InvalidSpec, match=f"made its persistent buffer '{name}' after distribute"):
        run_in_memory(filled, 2, strategy, register)


class Exchanging(nn.Module):
    """A layer whose buffers take over each other's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Tensor
        self.register_buffer("now", torch.arange(4.0).view(2, 2))
        self.register_buffer("before", torch.zeros(2, 2))

    def shift(self) -> None:
        self.before = self.now
        self.now = self.now + 1

    def swap(self) -> None:
        self.before, self.now = self.now, self.before

    def transpose(self) -> None:
        self.now = self.now.t()


@pytest.mark.parametrize("change", ["shift", "swap", "transpose"])
def test_buffers_may_exchange_their_tensors(change: str) -> None:
    layer, alone = Exchanging(), Exchanging()
    buffers = StepBuffers()
    for _ in range(3):
        buffers.begin(layer)
        for each in (layer, alone):
            getattr(each, change)()
    buffers.begin(layer)
    assert torch.equal(layer.now, alone.now)
    assert torch.equal(layer.before, alone.before)


def written_in_forward(name: str, world_size: int, past_count: bool) -> None:
    member = Member(name, world_size)

    def write(module: nn.Module, _: object) -> None:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        if past_count:
            weight.data = weight.data * 0.9
        else:
            with torch.no_grad():
                weight.mul_(0.9)

    layer = member.shown.layers[0]  # type: ignore[index]
    layer.register_forward_pre_hook(write)  # type: ignore[union-attr]
    member.step(nothing)


@pytest.mark.parametrize(
    ("strategy", "world_size", "past_count"),
    [(name, size, past) for name, size in WORLDS for past in FREES.get(name, ())],
)
def test_writes_to_gathered_weights_are_refused(
    strategy: str, world_size: int, past_count: bool
) -> None:
    """Writes would be lost when the gathered weights are freed."""
    with pytest.raises(InvalidSpec, match="a forward pass has written to weights"):
        run_in_memory(written_in_forward, world_size, strategy, world_size, past_count)


def embedded(name: str) -> None:
    """Take a step of a model with an embedding that limits the norms of its rows."""

    def build(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(LimitedRows(), nn.Linear(12, 5))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    strategy = equality.made(name, 2)()
    assert isinstance(strategy, SynchronousStrategy)
    entered(Run(build=build, loader=equality.loader, loss=equality.loss), strategy)
    strategy.begin_step()
    strategy.forward_backward(torch.arange(6).view(2, 3), torch.arange(2), equality.loss, 1.0)
    strategy.end_step(lambda: None)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_an_embedding_with_limited_norms_is_refused_if_it_is_gathered(strategy: str) -> None:
    """The embedding writes to its weights in the forward pass."""
    with pytest.raises(InvalidSpec, match=r"writes to 0\.weight"):
        run_in_memory(embedded, 2, strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *(("ddp", {}), ("zero1", {}), ("zero2", {}), ("fsdp", {}), ("hsdp", {"shard": 2})),
        ("tensor", {"min_split_bytes": 0}),
    ],
)
def test_a_kill_during_writes_leaves_the_result_of_one_process(
    cluster: LocalCluster, strategy: str, options: dict[str, int]
) -> None:
    """The others take the step again as if it had never begun: weights, the weights that follow
    them, and a count of passes are those of one process."""
    run = Elastic(
        coordinator=cluster.coordinator,
        job=f"writing-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        options=options,
        desired_members=3,
        batch_size=12,
        at_step=4,
    )
    with Ranks() as ranks:
        members = [
            ranks.start(
                followed_weights.train,
                replace(run, member_id=name, fault="kill" if name == "c" else ""),
            )
            for name in "abc"
        ]
        assert members[2].join() == -signal.SIGKILL
        ends = [member.expect("finished") for member in members[:2]]
        expected = followed_weights.one_process(run, ends[0]["step"])
        for end in ends:
            assert end["step"] > run.at_step + 1
            assert end["state"].keys() == expected.keys()
            for name, own in end["state"].items():
                assert (torch.tensor(own) - expected[name]).abs().max() < 1e-5, name
