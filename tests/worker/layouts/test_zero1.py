"""ZeRO-1: equal to one process with any optimizer, and each rank holds only its part of the
state."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes.worlds import (
    LaidOutTraining,
    Training,
    assemble,
    largest_difference,
    one_process,
    this_world,
    train_rank,
)
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.clipping import clip
from shoal.layouts.replicated import ReplicatedLayout
from shoal.layouts.zero1 import Zero1Layout, move_to_flat_storage, partition
from shoal.state.shards import MODEL, OPTIM, StateShard
from shoal_proto.errors import GenerationBroken, InvalidSpec, NonFiniteGradient

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""


class Net(nn.Module):
    """A model with indivisible sizes, one very large parameter, a buffer, a tie and a frozen
    part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.hidden(self.frozen(self.norm(self.embedding(tokens)))))
        logits: Tensor = self.head(hidden)
        return logits


class HalfUsed(nn.Module):
    """A model of two layers, one of which takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 37), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(tokens % 3, 3).float()
        outputs: Tensor = self.used(one_hot)
        return outputs


class TwoDtypes(nn.Module):
    """A model with half of its layers in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens).float())
        return logits


class Matrices(nn.Module):
    """A model whose parameters are all matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 5)
        self.hidden = nn.Linear(5, 6, bias=False)
        self.head = nn.Linear(6, 37, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return logits


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randint(37, (50,), generator=generator)
    return inputs, (inputs * 7 + 3) % 37


def two_groups(kind: Callable[..., torch.optim.Optimizer], parameters: Any) -> Any:
    """Make an optimizer in which the first parameter has a learning rate of its own."""
    first, *rest = list(parameters)
    return kind([{"params": [first], "lr": 0.003}, {"params": rest}])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(two_groups, partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "adamw": partial(two_groups, partial(torch.optim.AdamW, lr=0.01)),
    # Its state is per row and column: the update of an element depends on the others.
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "muon": partial(torch.optim.Muon, lr=0.01),
}


def training_of(optimizer: str = "sgd", **changes: Any) -> Training:
    settings: dict[str, Any] = {
        "model": Net,
        "optimizer": OPTIMIZERS[optimizer],
        "data": tokens,
        "loss": nn.functional.cross_entropy,
        "num_steps": 12,
        "batch_size": 7,
    }
    return Training(**(settings | changes))


def check_equal(state_shards: list[StateShard], training: Training) -> None:
    ours, theirs = assemble(state_shards), one_process(training)
    # A layout holds a tied parameter once; a state_dict has it under both names.
    theirs = {name: tensor for name, tensor in theirs.items() if name in ours}
    assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize(
    ("optimizer", "world_size"), [("sgd", 2), ("adamw", 4), ("adafactor", 2), ("adafactor", 3)]
)
def test_equal_to_one_process(optimizer: str, world_size: int) -> None:
    """Batches of 7 are not divisible by these numbers of ranks."""
    training = training_of(optimizer, num_steps=50)
    check_equal(run_in_memory(train_rank, world_size, training, Zero1Layout), training)


def test_whole_matrices_of_one_owner_each_are_equal_to_one_process() -> None:
    """Muon's update of a matrix depends on all its elements."""
    training = training_of("muon", model=Matrices, num_steps=50)
    check_equal(run_in_memory(train_rank, 2, training, Zero1Layout), training)


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicated_equal_to_one_process(world_size: int) -> None:
    """The plain data-parallel layout has the weights of one process."""
    training = training_of("adamw", accumulate=2)
    check_equal(run_in_memory(train_rank, world_size, training, ReplicatedLayout), training)


def test_accumulated_gradients_count_once_a_step() -> None:
    """Gradients owned by other ranks must not add up over steps of two backward passes each."""
    training = training_of("adamw", accumulate=2)
    check_equal(run_in_memory(train_rank, 3, training, Zero1Layout), training)


def test_ranks_that_own_nothing_take_part() -> None:
    """Five ranks share four parameters."""
    training = training_of("sgd", model=TwoDtypes, num_steps=10)
    state_shards = run_in_memory(train_rank, 5, training, Zero1Layout)
    owning = [
        any(name.startswith(OPTIM) for name in state_shard.shards) for state_shard in state_shards
    ]
    assert sorted(owning) == [False, False, True, True, True]
    check_equal(state_shards, training)


def test_dtypes_may_be_mixed() -> None:
    """Parameters of both dtypes share an owner's memory."""
    training = training_of("adamw", model=TwoDtypes)
    check_equal(run_in_memory(train_rank, 2, training, Zero1Layout), training)


def test_a_parameter_without_gradient_needs_find_unused_parameters() -> None:
    """A model without the option is refused: the parameter's bucket is never complete."""
    training = training_of(model=HalfUsed, num_steps=10)
    lay_out = partial(Zero1Layout, find_unused_parameters=True)
    check_equal(run_in_memory(train_rank, 3, training, lay_out), training)
    with pytest.raises((AssertionError, RuntimeError)):
        run_in_memory(train_rank, 2, training, Zero1Layout)


def on_this_rank(training: Training, num_steps: int) -> LaidOutTraining:
    """Return the training after `num_steps` steps."""
    world = this_world()
    rank = LaidOutTraining(training, Zero1Layout, world)
    for step in range(num_steps):
        rank.step(step)
    return rank


def state_bytes(training: Training) -> tuple[int, int]:
    """Return the bytes of the optimizer's state and of the gradients left on this rank after 3
    steps."""
    rank = on_this_rank(training, 3)
    state = rank.binding.optimizer.state.values()
    slots = [t for s in state for t in s.values() if isinstance(t, Tensor) and t.ndim]
    held = rank.layout.held.values()
    gradients = [t.grad for t in held if isinstance(t, nn.Parameter) and t.grad is not None]
    return sum(t.nbytes for t in slots), sum(t.nbytes for t in gradients)


class Even(nn.Module):
    """A model of eight parameters of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37, bias=False) for _ in range(8))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = nn.functional.one_hot(tokens, 37).float()
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_keeps_its_part_of_the_optimizer_state(world_size: int) -> None:
    """AdamW has two moments, of 37 x 37 floats a layer; a rank keeps no gradients but its own."""
    found = run_in_memory(state_bytes, world_size, training_of("adamw", model=Even))
    layers = 8 // world_size
    assert found == [(layers * 2 * 37 * 37 * 4, layers * 37 * 37 * 4)] * world_size


def clipped_norms(training: Training) -> list[float]:
    """Return the norm of all gradients in each of three clipped steps."""
    rank = on_this_rank(training, 0)
    norms: list[float] = []
    rank.binding.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(clip(rank.layout, 0.01)))
    )
    for step in range(3):
        rank.step(step)
    return norms


def test_the_norm_of_gradients_is_that_of_all_of_them() -> None:
    """Gradients are counted by their owners."""
    training = training_of()
    alone, *_ = run_in_memory(clipped_norms, 1, training)
    for norms in run_in_memory(clipped_norms, 3, training):
        assert norms == pytest.approx(alone, rel=1e-5)


class Small(nn.Module):
    """A model of two parameters in double precision: one of three ranks owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 37, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.one_hot(tokens % 3, 3).double())
        return logits


def test_a_rank_that_owns_nothing_clips_by_the_norm_of_all_gradients() -> None:
    training = training_of(model=Small)
    alone, *_ = run_in_memory(clipped_norms, 1, training)
    for norms in run_in_memory(clipped_norms, 3, training):
        assert norms == pytest.approx(alone, rel=1e-12)


def poisoned(training: Training) -> str:
    """Return the class of a rank's error if the second rank's loss is NaN."""
    rank = on_this_rank(training, 3)
    rank.layout.step = 3
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    rank.layout.begin()
    inputs, targets = training.batch(3)
    rank.layout.backward(training.loss(rank.layout.module(inputs), targets) * factor, 1.0)
    with pytest.raises((NonFiniteGradient, GenerationBroken), match="at step 3") as caught:
        rank.layout.reduce()
    return type(caught.value).__name__


def test_only_the_rank_whose_gradient_is_nan_raises_non_finite_gradient() -> None:
    """The owner of the parameter may be another rank."""
    errors = run_in_memory(poisoned, 3, training_of())
    assert errors == ["GenerationBroken", "NonFiniteGradient", "GenerationBroken"]


def released(training: Training) -> bool:
    rank = on_this_rank(training, 3)
    wrapped: Any = rank.layout.module
    rank.layout.release()
    rank.layout.release()
    return hasattr(wrapped, "reducer")


def test_a_released_layout_holds_no_reducer() -> None:
    """A reducer would keep the group alive."""
    assert run_in_memory(released, 2, training_of()) == [False, False]


def test_every_parameter_is_held_by_all_and_counted_by_one() -> None:
    """The same holds for buffers and frozen parameters."""

    def counted() -> tuple[set[str], set[str], set[str]]:
        layout = on_this_rank(training_of(), 1).layout
        names = [MODEL + "hidden.weight", OPTIM + "hidden.weight/exp_avg"]
        return (
            set(layout.held),
            {name for name in layout.held if layout.is_counted_here(name)},
            {name for name in names if layout.is_lost_with_rank(name)},
        )

    found = run_in_memory(counted, 3)
    assert all(held == found[0][0] for held, _, _ in found)
    assert sorted(name for _, counts, _ in found for name in counts) == sorted(found[0][0])
    assert all(travels == {OPTIM + "hidden.weight/exp_avg"} for _, _, travels in found)


@pytest.mark.parametrize(
    ("sizes", "n", "owners"),
    [
        ([], 3, []),
        ([5], 3, [0]),
        ([1, 1, 1, 1], 2, [0, 1, 0, 1]),
        ([100, 1, 1, 1, 1], 2, [0, 1, 1, 1, 1]),
        ([3, 3, 2, 2, 2], 2, [0, 1, 0, 1, 0]),
        ([0, 0], 2, [0, 0]),
    ],
)
def test_parameters_are_spread_by_their_bytes(sizes: list[int], n: int, owners: list[int]) -> None:
    """Parameters go, largest first, to the rank that has the fewest bytes."""
    assert partition(sizes, n) == owners


def test_parameters_in_one_piece_of_memory_do_not_overlap_and_keep_their_strides() -> None:
    """Writing to a parameter writes to the piece; a transposed parameter stays transposed."""
    transposed = nn.Parameter(torch.zeros(3, 5).t())
    image = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    gaps = nn.Parameter(torch.zeros(4, 4)[:, :2])
    parameters = [
        nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        transposed,
        image,
        gaps,
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(0, 3)),
    ]
    strides = [parameter.stride() for parameter in parameters]
    memory = move_to_flat_storage(parameters)
    with torch.no_grad():
        for value, parameter in enumerate(parameters, 1):
            parameter.fill_(value)
    for value, parameter in enumerate(parameters, 1):
        assert bool((parameter == value).all())
        assert parameter.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert [p.stride() for p in parameters[:3]] == strides[:3]
    assert gaps.stride() == (2, 1)


def test_a_bucket_without_a_size_is_refused() -> None:
    """A size of zero is refused."""
    with pytest.raises(InvalidSpec, match="bucket_mb"):
        run_in_memory(train_rank, 1, training_of(), partial(Zero1Layout, bucket_mb=0))
