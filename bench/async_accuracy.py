"""Accuracy of the README's script, `examples/train.py`, under asynchronous strategies.

    make bench NAME=async_accuracy
    .venv/bin/python bench/async_accuracy.py 5 3 8   # runs of each kind, then numbers of workers

`async-sgd` and `ssp` run with their defaults, at the momentum of 0.9 that the script also uses for
`ddp`. `async_accuracy_min`: the lowest share of digits classified correctly over all runs; its peer
is one run of `ddp`.
"""

import re
import subprocess
import sys
from pathlib import Path
from statistics import median

from rows import Row, publish

SCRIPT = Path(__file__).parents[1] / "examples" / "train.py"
STRATEGIES = ("async-sgd", "ssp")
NUM_RUNS = 5
NUM_WORKERS = (3, 8)
LIMIT_S = 600.0
RIGHT = re.compile(r"([0-9.]+)% correct")


def accuracy(strategy: str, num_workers: int) -> float:
    """The lowest share of digits, 0 to 1, that a worker classified correctly in one run."""
    command = [sys.executable, "-m", "shoal_client", "run", "-n", str(num_workers)]
    done = subprocess.run(
        [*command, str(SCRIPT), strategy],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    shares = [float(share) / 100 for share in RIGHT.findall(done.stdout)]
    if done.returncode or not shares:
        raise SystemExit(f"{strategy} with {num_workers} workers failed:\n{done.stderr[-3000:]}")
    print(f"{strategy}, {num_workers} workers: {min(shares):.3f}", flush=True)
    return min(shares)


def main() -> None:
    numbers = [int(argument) for argument in sys.argv[1:]]
    num_runs, sizes = numbers[0] if numbers else NUM_RUNS, numbers[1:] or NUM_WORKERS
    rows, lowest = [], 1.0
    ddp = accuracy("ddp", min(sizes))
    for strategy in STRATEGIES:
        for size in sizes:
            found = [accuracy(strategy, size) for _ in range(num_runs)]
            lowest = min(lowest, *found)
            name = f"async_accuracy_{strategy.replace('-', '_')}_{size}_workers"
            rows.append(Row(metric=name, value=median(found), unit="of 1", runs=num_runs))
    total = num_runs * len(sizes) * len(STRATEGIES)
    rows.append(
        Row(
            metric="async_accuracy_min",
            value=lowest,
            unit="of 1",
            runs=total,
            peer="ddp",
            peer_value=ddp,
        )
    )
    publish("async_accuracy", rows)


if __name__ == "__main__":
    main()
