"""Time to the same loss with compressed gradients, on links of 100 Mb/s.

    make bench NAME=compression
    sudo .venv/bin/python bench/compression.py        # 3 runs with a seed each
    sudo .venv/bin/python bench/compression.py 1

Four ranks, each in a network namespace of its own, joined by a bridge; every link is shaped to 100
Mb/s in both directions. They train an MLP of 4.5 MB on scikit-learn's digits by torch's DDP over
Gloo, with Shoal's hook and default options. Needs root, `ip` and `tc`.

The time to the loss ends when the training loss, averaged over the ranks and over ten steps, falls
below 0.1. `compression_speedup_{name}`: this time without compression, over the time with it.
`compression_accuracy_drop_{name}`: points of accuracy on held-out images that are lost after the
same number of steps. Means of all runs. Shoal's count of sent bytes is printed beside the
kernel's.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

from rows import Row, publish
from training.on_shaped_link import NONE, Part, Training
from training.shaped_links import ShapedLinks

from shoal.compression import COMPRESSIONS
from shoal.demo import data as digits

NUM_RANKS = 4
MEGABITS = 100
NUM_STEPS = 200
DEFAULT_RUNS = 3
TARGET_LOSS = 0.1
SMOOTHED_OVER = 10
SCRIPT = Path(__file__).parent / "training" / "on_shaped_link.py"


class Failed(RuntimeError):
    """A rank ended with an error, or a training did not reach the loss."""


def train_all(links: ShapedLinks, directory: Path, num_runs: int) -> list[list[Training]]:
    """Run all trainings; return results by rank."""
    digits.save(directory / "digits.npz")
    trainings = [(name, seed) for seed in range(num_runs) for name in (NONE, *COMPRESSIONS)]
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(links.hosts):
            part = Part(
                rank=rank,
                world_size=NUM_RANKS,
                address=links.address(rank),
                store=str(directory / "store"),
                data=str(directory / "digits.npz"),
                trainings=trainings,
                num_steps=NUM_STEPS,
            )
            command = ["ip", "netns", "exec", host, sys.executable, str(SCRIPT)]
            process = subprocess.Popen(
                [*command, json.dumps(vars(part))], stdout=subprocess.PIPE, text=True
            )
            # Called in reverse order at the end of the block, so that no process is left behind.
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        every: list[list[Training]] = [[] for _ in ranks]
        for name, seed in trainings:
            for process, seen in zip(ranks, every, strict=True):
                assert process.stdout is not None
                line = process.stdout.readline()
                if not line:
                    raise Failed(f"a rank ended in {name}, seed {seed}; see above")
                seen.append(Training(**json.loads(line)))
            print(summary([seen[-1] for seen in every]), flush=True)
    return every


def summary(ranks: Sequence[Training]) -> str:
    first = ranks[0]
    sent, wire = (sum(each) for each in zip(*((t.counted_bytes, t.wire_bytes) for t in ranks)))  # noqa: B905
    step_s = first.ended_s[-1] / len(first.ended_s)
    rate = 8 * wire / len(ranks) / first.ended_s[-1] / 1e6
    return (
        f"{first.name}, seed {first.seed}: {seconds_to_loss(ranks):.2f} s to the loss, "
        f"{1000 * step_s:.0f} ms a step, {first.accuracy:.1f} % right, "
        f"{sent / 1e6:.1f} MB counted, {wire / 1e6:.1f} MB on the wire, {rate:.0f} Mb/s"
    )


def seconds_to_loss(ranks: Sequence[Training]) -> float:
    """Return the time of the last step of the first window whose mean loss is under the target."""
    losses = [mean(step) for step in zip(*(each.losses for each in ranks), strict=True)]
    for end in range(SMOOTHED_OVER, len(losses) + 1):
        if mean(losses[end - SMOOTHED_OVER : end]) < TARGET_LOSS:
            return max(each.ended_s[end - 1] for each in ranks)
    raise Failed(f"{ranks[0].name}: no loss under {TARGET_LOSS} in {len(losses)} steps")


def rows_of(every: Sequence[Sequence[Training]]) -> list[Row]:
    runs = list(zip(*every, strict=True))
    by_name = {
        name: [ranks for ranks in runs if ranks[0].name == name] for name in (NONE, *COMPRESSIONS)
    }
    seconds = {name: mean(map(seconds_to_loss, own)) for name, own in by_name.items()}
    accuracy = {name: mean(ranks[0].accuracy for ranks in own) for name, own in by_name.items()}
    num_runs = len(by_name[NONE])
    rows = []
    for name in COMPRESSIONS:
        figures = (
            ("speedup", seconds[NONE] / seconds[name], "x"),
            ("accuracy_drop", accuracy[NONE] - accuracy[name], "points"),
        )
        rows += [
            Row(metric=f"compression_{what}_{name}", value=value, unit=unit, runs=num_runs)
            for what, value, unit in figures
        ]
    return rows


def main() -> None:
    # On SIGTERM, leave the `with` blocks, which remove namespaces and ranks.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_RUNS
    with (
        ShapedLinks(NUM_RANKS, megabits=MEGABITS) as links,
        tempfile.TemporaryDirectory() as directory,
    ):
        every = train_all(links, Path(directory), num_runs)
    publish("compression", rows_of(every))


if __name__ == "__main__":
    main()
