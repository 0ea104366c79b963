"""Ranks over Gloo in separate processes, and the same training in one process."""

import pickle
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Ranks, Report
from torch import Tensor, nn

from shoal.data.order import range_of_rank
from shoal.layouts.base import LayOut, Layout, World
from shoal.layouts.optimizer_binding import MetaModel, OptimizerBinding
from shoal.state.shards import MODEL, StateShard, TensorShard

Losses = Callable[[Any, Any], Tensor]
_seeded = threading.Lock()
# Otherwise each rank that is a thread would have its own pool of threads.
torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to run. Its functions are importable by name, to be sent to a process."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Callable[[], tuple[Tensor, Tensor]]
    """Returns (inputs, targets); each step takes the next `batch_size` samples, cyclically."""
    loss: Losses
    num_steps: int = 10
    batch_size: int = 12
    accumulate: int = 1
    """Number of backward passes of a step, and of parts of its batch."""
    interleaved: bool = False
    """True if steps use `forward_backward`, for layouts that own the schedule."""
    seed: int = 0

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        # Ranks that are threads share one random generator.
        with _seeded:
            torch.manual_seed(self.seed)
            model = self.model()
        return model, self.optimizer(model.parameters())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.data()
        picked = torch.arange(step * self.batch_size, (step + 1) * self.batch_size) % len(inputs)
        return inputs[picked], targets[picked]


def one_process(training: Training) -> dict[str, Tensor]:
    """Return the state_dict after the same training in one process."""
    model, optimizer = training.build()
    for step in range(training.num_steps):
        optimizer.zero_grad()
        inputs, targets = training.batch(step)
        for part in range(training.accumulate):
            start, stop = range_of_rank(0, len(inputs), part, training.accumulate)
            loss = training.loss(model(inputs[start:stop]), targets[start:stop])
            (loss / training.accumulate).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class LaidOutTraining:
    """The training as one rank of a layout computes it."""

    def __init__(self, training: Training, lay_out: LayOut, world: World) -> None:
        self._training = training
        model, optimizer = training.build()
        # No rank may draw numbers before all have made the model: threads share the generator, and
        # code that restores its state (such as a pipeline's probe) would disturb other ranks.
        dist.barrier()
        meta_model = MetaModel(model, optimizer)
        initial = meta_model.initial().copied()
        self.layout: Layout = lay_out(meta_model.copy(), world)
        self.binding = OptimizerBinding(meta_model, optimizer, self.layout)
        meta_model.forget_weights()
        self.binding.fill(self._own_part(initial))

    def _own_part(self, whole: StateShard) -> StateShard:
        shards = {}
        for name, shard in whole.shards.items():
            chunk = self.binding.needed_chunk(name, shard.shape, shard.tensor.dtype)
            if chunk is not None:
                part = shard.tensor[chunk.slices_in(shard.chunk)]
                shards[name] = TensorShard(shape=shard.shape, chunk=chunk, tensor=part)
        return StateShard(step=0, shards=shards)

    def step(self, step: int) -> None:
        training, layout = self._training, self.layout
        self.binding.optimizer.zero_grad()
        layout.begin()
        inputs, targets = training.batch(step)
        for part in range(training.accumulate):
            start, stop = range_of_rank(0, len(inputs), part, training.accumulate)
            own_start, own_stop = range_of_rank(start, stop, layout.data_index, layout.data_count)
            weight = (own_stop - own_start) * layout.data_count / (stop - start)
            own = slice(own_start, max(own_stop, own_start + 1))  # a sample of weight 0 if empty
            weight /= training.accumulate
            if training.interleaved:
                layout.forward_backward(inputs[own], targets[own], training.loss, weight)
            else:
                layout.backward(training.loss(layout.module(inputs[own]), targets[own]), weight)
        layout.reduce()
        assert layout.synchronised()
        layout.check()
        self.binding.optimizer.step()
        layout.share_buffers()
        layout.stepped()

    def run(self) -> StateShard:
        """Run all steps, and return a copy of this rank's state."""
        for step in range(self._training.num_steps):
            self.step(step)
        return self.binding.collect(self._training.num_steps).copied()


def train_rank(training: Training, lay_out: LayOut) -> StateShard:
    """Train on this rank, whose torch.distributed is initialised."""
    return LaidOutTraining(training, lay_out, this_world()).run()


def this_world() -> World:
    """Return the world of this rank, whose torch.distributed is initialised."""
    group = dist.group.WORLD
    assert group is not None
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        group=group,
    )


def assemble(state_shards: Sequence[StateShard]) -> dict[str, Tensor]:
    """Assemble the whole model from its parts. Fails if they contradict each other or do not cover
    the model."""
    whole: dict[str, Tensor] = {}
    for state_shard in state_shards:
        for path, shard in state_shard.shards.items():
            if not path.startswith(MODEL):
                continue
            name = path.removeprefix(MODEL)
            if name not in whole:
                whole[name] = torch.full(shard.shape, float("nan"), dtype=torch.float64)
            place = whole[name][
                tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(shard.chunk.offsets, shard.chunk.sizes, strict=True)
                )
            ]
            given = shard.tensor.to(torch.float64)
            assert bool((place.isnan() | (place == given)).all()), f"ranks differ at {name}"
            place.copy_(given)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is not covered, or is not a number"
    return whole


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference over all tensors of two models with the same names."""
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(float((ours[n].double() - theirs[n].double()).abs().max()) for n in theirs)


def run_on_gloo(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `body(*arguments)` on each rank, in processes with a default Gloo group; return the
    results."""
    path = f"/tmp/shoal-world-{secrets.token_hex(8)}"
    try:
        with Ranks() as ranks:
            started = [
                ranks.start(_in_world, path, (rank, world_size), body, arguments)
                for rank in range(world_size)
            ]
            return [pickle.loads(rank.expect("returned")["value"]) for rank in started]
    finally:
        Path(path).unlink(missing_ok=True)


def _in_world(
    report: Report,
    path: str,
    place: tuple[int, int],
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank, world_size = place
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    value = body(*arguments)
    # After this barrier no rank needs another one.
    dist.barrier()
    # By value, as memory that multiprocessing shares is gone when this process ends.
    report("returned", value=pickle.dumps(value))
    dist.destroy_process_group()
