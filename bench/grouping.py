"""Gain of smart grouping: a model of 1,000 small layers on four ranks, "fsdp" over Gloo.

    make bench NAME=grouping
    .venv/bin/python bench/grouping.py 20     # measured steps instead of the default

`all_gathers_1000_layers`: all-gathers that torch issues in a forward pass with grouping. The peer
gathers each layer on its own (`min_group_bytes=0`), like plain PyTorch's fully_shard applied to
each layer. `grouping_speedup`: step time without grouping over step time with it. Both models are
in the same processes and take their steps in turns, so that other work on the machine affects both
alike; medians over steps of the slowest rank's time.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rows import Row, publish
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import Optimizer

import shoal

NUM_LAYERS, WIDTH, BATCH = 1000, 64, 8
NUM_RANKS, NUM_STEPS, WARM_UP = 4, 10, 2
LIMIT_S = 1800.0


def small_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def trained(min_group_bytes: int | None) -> tuple[nn.Module, Optimizer]:
    model = small_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return shoal.distribute(
        model, optimizer, strategy=shoal.FSDP(min_group_bytes=min_group_bytes), backend="gloo"
    )


def all_gathers(model: nn.Module) -> int:
    """Count the all-gathers of one forward pass of this rank."""
    with CommDebugMode() as counting, torch.no_grad():
        model(torch.ones(BATCH, WIDTH))
    counts = counting.get_comm_counts()
    return sum(number for operation, number in counts.items() if "gather" in str(operation))


def step_s(model: nn.Module, optimizer: Optimizer) -> float:
    """Take a step; return the seconds that it took on the slowest rank."""
    dist.barrier()
    started_s = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    took = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def run_rank(rank: int, directory: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    # Over Gloo, as between machines: torch does not count Shoal's collectives in shared memory.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "SHOAL_TRANSPORT": "tcp"}
    store = dist.FileStore(str(Path(directory) / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    models = {"with": trained(None), "without": trained(0)}
    gathers = {name: all_gathers(model) for name, (model, _) in models.items()}
    times_s: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP + num_steps):
        for name, (model, optimizer) in models.items():
            times_s[name].append(step_s(model, optimizer))
    if rank == 0:
        found = {
            name: {"gathers": gathers[name], "step_s": median(times_s[name][WARM_UP:])}
            for name in models
        }
        (Path(directory) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(num_steps: int) -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.tensor.debug", "shoal.strategies.layout.fsdp"]
    )
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=run_rank, args=(rank, directory, num_steps), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT_S)
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"ranks ended with {[rank.exitcode for rank in ranks]}")
        found: dict[str, dict[str, float]] = json.loads(
            (Path(directory) / "found.json").read_text()
        )
        return found


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_STEPS
    found = measure(num_steps)
    grouped, alone = found["with"], found["without"]
    publish(
        "grouping",
        [
            Row(
                metric="all_gathers_1000_layers",
                value=grouped["gathers"],
                unit="all-gathers a forward pass",
                runs=1,
                peer="without grouping",
                peer_value=alone["gathers"],
            ),
            Row(
                metric="grouping_step",
                value=grouped["step_s"] * 1e3,
                unit="ms",
                runs=num_steps,
                peer="without grouping",
                peer_value=alone["step_s"] * 1e3,
            ),
            Row(
                metric="grouping_speedup",
                value=alone["step_s"] / grouped["step_s"],
                unit="times",
                runs=num_steps,
            ),
        ],
    )


if __name__ == "__main__":
    main()
