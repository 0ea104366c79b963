"""What each strategy costs beside plain torch doing the same, what it moves and what it holds.

    make bench NAME=strategies
    .venv/bin/python bench/strategies.py ddp fsdp    # these only

- `step_overhead_STRATEGY`: median step under a session over the median step of plain torch, two
  ranks on Gloo in processes of their own; each step waits 10 ms beside its work, as for a device.
  The two are run in turns, three times each; the median of the ratios counts. For a model as
  small as this (2.1 MB) copies at peers and checks weigh more than they do for a real one.
- `step_overhead_session`: the same for one rank and "ddp": what `session.step()` itself costs.
- `bytes_per_step_STRATEGY`: what one of four ranks hands to collectives in a step, counted by the
  in-memory backend on real steps; the peer's value is what `shoal.plan` says before.
- `bytes_per_rank_STRATEGY`: parameters, gradients and optimizer state that one of four ranks holds
  behind a step, counted; the peer's value again what the plan says.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rows import Row, publish
from torch import nn
from torch.nn.functional import mse_loss
from torchrun import free_port
from training.strategy_models import GLOBAL_BATCH, new_model, new_optimizer, samples

import shoal
from shoal.backends.collectives import counts, reset_counts
from shoal.data import share
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")
NUM_RANKS, NUM_COUNTED = 2, 4
TURNS, NUM_STEPS, PAUSE_MS = 3, 150, 10
START_S = 180.0
SCRIPT = Path(__file__).parent / "training" / "on_strategy.py"


def block(
    system: str, strategy: str, place: Path, environment: dict[str, str], num_ranks: int
) -> float:
    """Median seconds a step, of all ranks together."""
    result = place / f"{system}-{strategy}-{time.monotonic_ns()}"
    command = [sys.executable, str(SCRIPT), system, strategy, str(NUM_STEPS), str(PAUSE_MS)]
    started = [
        subprocess.Popen(
            [*command, str(result)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    for process in started:
        if process.wait(START_S):
            raise SystemExit(f"{system} {strategy} ended with {process.returncode}")
    gaps = [gap for path in place.glob(f"{result.name}.*") for gap in json.loads(path.read_text())]
    return median(gaps)


def overheads(strategies: list[str], place: Path) -> list[Row]:
    rows = []
    config = LocalClusterConfig(directory=place / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        rows += in_turns(cluster, place, "ddp", "session", num_ranks=1)
        for strategy in strategies:
            rows += in_turns(cluster, place, strategy, strategy, num_ranks=NUM_RANKS)
    return rows


def in_turns(
    cluster: LocalCluster, place: Path, strategy: str, name: str, *, num_ranks: int
) -> list[Row]:
    ratios, ours, theirs = [], [], []
    for turn in range(TURNS):
        session = {
            "SHOAL_COORDINATOR": cluster.coordinator,
            "SHOAL_JOB": f"{name}-{turn}",
            "SHOAL_DESIRED_MEMBERS": str(num_ranks),
        }
        fixed = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ours.append(block("shoal", strategy, place, session, num_ranks))
        theirs.append(block("plain", strategy, place, fixed, num_ranks))
        ratios.append(ours[-1] / theirs[-1])
    print(f"{name}: {median(ours) * 1e3:.2f} ms, plain {median(theirs) * 1e3:.2f} ms", flush=True)
    return [
        Row(metric=f"step_overhead_{name}", value=median(ratios), unit="", runs=TURNS),
        Row(
            metric=f"step_time_{name}",
            value=median(ours) * 1e3,
            unit="ms",
            runs=TURNS,
            peer="torch",
            peer_value=median(theirs) * 1e3,
        ),
    ]


def counted(strategy: str) -> list[Row]:
    """Bytes of a real step on four ranks in this process, beside the plan's."""
    models = [new_model() for _ in range(NUM_COUNTED)]

    def body() -> tuple[int, int]:
        rank = dist.get_rank()
        optimizer: torch.optim.Optimizer = new_optimizer(models[rank])
        model, optimizer = shoal.distribute(models[rank], optimizer, strategy_of(strategy))
        # DDP finds its buckets in the first steps, and tells the others once.
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()
        reset_counts()
        step(model, optimizer)
        moved = sum(count.bytes for count in counts().values())
        return moved, held(model, optimizer)

    results = shoal.run_in_memory(body, NUM_COUNTED)
    model = new_model()
    told = shoal.plan(
        model,
        strategy_of(strategy),
        world_size=NUM_COUNTED,
        optimizer=new_optimizer(model),
        inputs=samples()[0][:GLOBAL_BATCH],
    )
    first = told.ranks[0]
    planned = sum(each.num_bytes for each in first.collectives)
    state = first.parameters + first.gradients + first.optimizer
    pairs = [("bytes_per_step", results[0][0], planned), ("bytes_per_rank", results[0][1], state)]
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


def strategy_of(name: str) -> object:
    return shoal.TensorParallel(min_split_bytes=0) if name == "tensor" else name


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = samples()
    own = slice(*share(0, GLOBAL_BATCH, *shoal.data_share(model)))
    shoal.forward_backward(model, inputs[own], targets[own], mse_loss)
    optimizer.step()


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state on this rank, each memory once."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [t for own in optimizer.state.values() for t in own.values() if torch.is_tensor(t)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def main() -> None:
    strategies = sys.argv[1:] or list(STRATEGIES)
    rows: list[Row] = []
    for strategy in strategies:
        rows += counted(strategy)
    with tempfile.TemporaryDirectory() as name:
        rows += overheads(strategies, Path(name))
    publish("strategies", rows)


if __name__ == "__main__":
    main()
