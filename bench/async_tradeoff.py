"""Trade-off of asynchrony: workers and staleness against accuracy and throughput.

    make bench NAME=async_tradeoff
    .venv/bin/python bench/async_tradeoff.py --runs 1 --workers 1 3 --codecs int8

A small convolutional network learns scikit-learn's digits under `shoal run`, ten epochs in batches
of 32 at a rate of 0.05 and a momentum of 0.9, with 1 to 8 workers of one thread each, for each
treatment of staleness; and with three workers for each compression of gradients. One worker gives
the result of one process. All workers share this machine.

`async_right_{policy}_{n}`: share of 360 held-out digits that are classified correctly.
`async_staleness_{policy}_{n}`: mean updates of others between a worker's pull and its push.
`async_steps_{policy}_{n}`: steps a second, of all workers together.
`async_right_{codec}_3_workers`: share of digits classified correctly with compressed gradients; its
peer is the share without compression.

With `--in-turns`, workers are objects in this process that push in turns to a parameter server:
the staleness is exactly the number of other workers, whatever else the machine does, and throughput
is not measured.

    .venv/bin/python bench/async_tradeoff.py --in-turns
    .venv/bin/python bench/async_tradeoff_plot.py    # draws docs/async-tradeoff.svg
"""

import argparse
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# Parameter servers without a cluster are part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import torch
from rows import Row, publish
from support.clusters.parameter_servers import ParameterServers
from support.members.async_members import start
from torch.nn.functional import cross_entropy
from training.async_learning import BATCH, EPOCHS, network, samples, share_right

from shoal.compression import COMPRESSIONS
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal_proto.errors import NonFiniteGradient

SCRIPT = Path(__file__).parent / "training" / "async_learning.py"
POLICIES = ("damp", "none", "compensate")
NUM_WORKERS = (1, 2, 3, 5, 8)
WORKERS_OF_CODECS = 3
LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """Results of one training; a diverged one has accuracy 0."""

    right: float
    staleness: float
    steps_per_s: float


def train_by_processes(num_workers: int, seed: int, **options: str) -> Found:
    asked = json.dumps({"seed": seed, "options": options})
    command = [sys.executable, "-m", "shoal_client", "run", "-n", str(num_workers), str(SCRIPT)]
    done = subprocess.run(
        [*command, asked], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if '"right"' in line]
    results = [json.loads(line[line.index("{") :]) for line in lines]
    if done.returncode and "NonFiniteGradient" in done.stderr + done.stdout:
        return Found(right=0.0, staleness=0.0, steps_per_s=0.0)
    if done.returncode or not results:
        raise SystemExit(f"{options} with {num_workers} workers failed:\n{done.stderr[-3000:]}")
    num_steps = sum(each["steps"] for each in results)
    found = Found(
        right=min(each["right"] for each in results),
        staleness=sum(each["staleness"] * each["steps"] for each in results) / num_steps,
        steps_per_s=num_steps / max(each["seconds"] for each in results),
    )
    print(num_workers, options, found, flush=True)
    return found


def train_in_turns(num_workers: int, seed: int, **options: str) -> Found:
    (images, labels), held_out = samples()
    orders = (
        torch.randperm(len(images), generator=torch.Generator().manual_seed(100 * seed + epoch))
        for epoch in range(EPOCHS)
    )
    batches = itertools.chain.from_iterable(order.split(BATCH) for order in orders)
    with ParameterServers(1) as servers:
        members = []
        for rank in range(num_workers):
            torch.manual_seed(seed)
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            strategy = AsyncSGD(**options)  # type: ignore[arg-type]
            members.append((start(servers, model, optimizer, rank=rank, strategy=strategy), model))
        try:
            for number, batch in enumerate(batches):
                strategy, model = members[number % num_workers]
                if number >= num_workers:
                    strategy.end_step(lambda: None)
                strategy.begin_step()
                strategy.backward(cross_entropy(model(images[batch]), labels[batch]), 1.0)
            members[0][0].finish()
            right = share_right(members[0][1], *held_out)
        except NonFiniteGradient:
            right = 0.0
        for strategy, _ in members:
            strategy.close()
    found = Found(right=right, staleness=num_workers - 1.0, steps_per_s=0.0)
    print(num_workers, options, found, flush=True)
    return found


def rows_of(name: str, runs: list[Found]) -> list[Row]:
    return [
        Row(metric=f"async_{what}_{name}", value=median(values), unit=unit, runs=len(runs))
        for what, unit, values in (
            ("right", "of 1", [run.right for run in runs]),
            ("staleness", "updates", [run.staleness for run in runs]),
            ("steps", "1/s", [run.steps_per_s for run in runs]),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=NUM_WORKERS)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--codecs", nargs="*", default=tuple(COMPRESSIONS))
    parser.add_argument("--in-turns", action="store_true")
    asked = parser.parse_args()
    train = train_in_turns if asked.in_turns else train_by_processes
    rows: list[Row] = []
    for policy in asked.policies:
        for size in asked.workers:
            runs = [train(size, seed, staleness=policy) for seed in range(asked.runs)]
            rows += rows_of(f"{policy}_{size}", runs)
    plain = [train(WORKERS_OF_CODECS, seed).right for seed in range(asked.runs)]
    for codec in asked.codecs:
        found = [
            train(WORKERS_OF_CODECS, seed, compression=codec).right for seed in range(asked.runs)
        ]
        rows.append(
            Row(
                metric=f"async_right_{codec}_{WORKERS_OF_CODECS}_workers",
                value=median(found),
                unit="of 1",
                runs=asked.runs,
                peer="not compressed",
                peer_value=median(plain),
            )
        )
    publish("async_tradeoff", rows)


if __name__ == "__main__":
    main()
