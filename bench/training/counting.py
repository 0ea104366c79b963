"""Traffic and memory of one of four ranks in a real step, beside the predictions of `shoal.plan`.

The ranks are threads of this process, over a backend that counts bytes. Local SGD needs a session;
a round of it is counted, and its bytes are divided by the steps of the round.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import mse_loss
from training.strategy_models import GLOBAL_BATCH, NUM_SAMPLES, new_model, new_optimizer, samples

import shoal
from shoal.backends.process_group.collectives import counts, reset_counts
from shoal.data.order import range_of_rank
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

NUM_RANKS = 4
ROUNDS = {"local-sgd": shoal.LocalSGD, "diloco": shoal.DiLoCo}
EVERY_STEPS = 16
Sizes = dict[StorageWeakRef, int]


def counted(strategy: str, place: Path) -> list[Row]:
    """Return `bytes_per_step` and `bytes_per_rank` of rank 0, with the predictions of the plan."""
    if strategy in ROUNDS:
        moved, held = count_round(strategy, place)
    else:
        moved, held = shoal.run_in_memory(count_step, NUM_RANKS, strategy, models())[0]
    model = new_model()
    planned = shoal.plan(
        model,
        strategy_of(strategy),
        world_size=NUM_RANKS,
        optimizer=new_optimizer(model),
        inputs=samples()[0][:GLOBAL_BATCH],
    ).ranks[0]
    pairs = [
        ("bytes_per_step", moved, planned.bytes_per_step),
        ("bytes_per_rank", held, planned.held),
    ]
    return [
        Row(
            metric=f"{name}_{strategy}",
            value=value,
            unit="bytes",
            runs=1,
            peer="shoal.plan",
            peer_value=expected,
        )
        for name, value, expected in pairs
    ]


def strategy_of(name: str) -> Any:
    if name in ROUNDS:
        return ROUNDS[name](every_steps=EVERY_STEPS)
    return shoal.TensorParallel(min_split_bytes=0) if name == "tensor" else name


def models() -> Iterator[nn.Module]:
    """Return equal models, one for each rank. The ranks are threads that share a random generator,
    so the models are made before they start."""
    return iter([new_model() for _ in range(NUM_RANKS)])


def count_step(strategy: str, made: Iterator[nn.Module]) -> tuple[float, int]:
    """Return the bytes that a rank passes to collectives in a step, and its bytes of memory when
    the step is applied (see `held`)."""
    model = next(made)
    optimizer: torch.optim.Optimizer = new_optimizer(model)
    model, optimizer = shoal.distribute(model, optimizer, strategy_of(strategy))
    dist.barrier()
    # DDP determines its buckets in the first steps, and then sends them to the other ranks once.
    for _ in range(3):
        step(model, optimizer)
        optimizer.zero_grad()
    reset_counts()
    gradients = step(model, optimizer)
    return float(sum(count.bytes for count in counts().values())), held(model, optimizer, gradients)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sizes:
    """Take a step; return the memory of gradients before `optimizer.step()`, which drops gradients
    that belong to other ranks."""
    inputs, targets = samples()
    own = slice(*range_of_rank(0, GLOBAL_BATCH, *shoal.data_share(model)))
    shoal.forward_backward(model, inputs[own], targets[own], mse_loss)
    gradients = storages(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return gradients


def count_round(strategy: str, place: Path) -> tuple[float, int]:
    """Return the same figures for a member's second round; the bytes for collectives are divided by
    the steps of the round."""
    config = LocalClusterConfig(directory=place / strategy, num_parameter_servers=0)
    with LocalCluster(config) as cluster, ThreadPoolExecutor(NUM_RANKS) as threads:
        found = [
            threads.submit(count_member, cluster.coordinator, strategy, model) for model in models()
        ]
        first, *_ = [each.result() for each in found]
        return first


def count_member(coordinator: str, strategy: str, model: nn.Module) -> tuple[float, int]:
    optimizer: torch.optim.Optimizer = new_optimizer(model)
    moved = 0
    with shoal.join(
        f"counted-{strategy}",
        coordinator=coordinator,
        backend="in-memory",
        desired_members=NUM_RANKS,
    ) as session:
        model, optimizer = session.distribute(model, optimizer, strategy_of(strategy))
        epochs = 2 * EVERY_STEPS * GLOBAL_BATCH // NUM_SAMPLES
        for batch in session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=epochs):
            if batch.step == EVERY_STEPS:
                reset_counts()
            with session.step():
                session.forward_backward(batch, mse_loss)
            moved = sum(count.bytes for count in counts().values())
        strategy_run: Any = session.strategy
        agreed = strategy_run._outer_loop.outgoing().tensors.values()
        gradients = storages(p.grad for p in model.parameters() if p.grad is not None)
        return moved / EVERY_STEPS, held(model, optimizer, gradients, agreed)


def held(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Sizes,
    more: Iterable[Tensor] = (),
) -> int:
    """Count bytes of parameters, gradients and optimizer state on this rank, each storage once.

    Memory of gradients counts while it exists, also if only DDP's buckets refer to it.
    """
    state = [t for own in optimizer.state.values() for t in own.values() if torch.is_tensor(t)]
    found = storages([*model.parameters(), *state, *more])
    found |= {place: size for place, size in gradients.items() if not place.expired()}
    return sum(found.values())


def storages(tensors: Iterable[Any]) -> Sizes:
    """Return the storages of tensors and their sizes, without keeping the storages alive."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    places = (tensor.untyped_storage() for tensor in local)
    return {StorageWeakRef(place): place.nbytes() for place in places}


__all__ = ["ROUNDS", "counted"]
