"""Accuracy of models that members train asynchronously, compared with one process.

    make bench NAME=accuracy
    .venv/bin/python bench/accuracy.py digits 1      # one task, number of seeds

Real processes on one machine: etcd, a coordinator, two parameter servers, 1, 4 or 8 workers. The
one process runs plain torch, with the same samples, batch size and learning-rate schedule as the
workers together. See training/accuracy_tasks.py for the tasks. Medians over the seeds, in
bench/results/accuracy_{task}.json:

- `accuracy_{task}_{mode}_{workers}`: percent of the held-out samples that are classified
  correctly after the last update;
- `loss_{task}_{mode}_{workers}`: their mean loss, in nats;
- `staleness_{task}_{mode}_{workers}`: mean staleness of a push of parameters, in updates of others.

Modes: `async`; `ssp` with a bound of 4 rounds; `dc_asgd`, delay compensation with its defaults,
which compensates parameters but not rows of embeddings. The last printed line says whether
`dc_asgd` is within half a point of the one process in every cell.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rows import Row, publish

sys.path.insert(0, str(Path(__file__).parent / "training"))

from accuracy_tasks import TASKS, Score
from on_accuracy import STRATEGIES, Training, combine_parts, prepare, train
from patient_servers import patient_servers

NUM_WORKERS = (1, 4, 8)
BAR_POINTS = 0.5


@dataclass(kw_only=True)
class Cell:
    """Results of one task, mode and number of workers. Each list has one entry per seed."""

    task: str
    mode: str
    num_workers: int
    scores: list[Score] = field(default_factory=list)
    stalenesses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.task}_{self.mode}_{self.num_workers}"

    @property
    def accuracy(self) -> float:
        return median(score.accuracy for score in self.scores)

    @property
    def loss(self) -> float:
        return median(score.loss for score in self.scores)

    def run(self, pool: ProcessPoolExecutor, coordinator: str, seed: int) -> None:
        """Train once more."""
        began_s = time.monotonic()
        training = Training(task=self.task, mode=self.mode, num_workers=self.num_workers, seed=seed)
        parts = [pool.submit(train, training, coordinator) for _ in range(self.num_workers)]
        score, staleness = combine_parts([part.result() for part in parts])
        self.scores.append(score)
        self.stalenesses.append(staleness)
        print(
            f"{training.job}: {score.accuracy:.2f} %, loss {score.loss:.4f}, "
            f"staleness {staleness:.1f}, {time.monotonic() - began_s:.0f} s",
            flush=True,
        )

    def rows(self, alone: "Cell") -> list[Row]:
        return [
            Row(
                metric=f"{figure}_{self.name}",
                value=value,
                unit=unit,
                runs=len(self.scores),
                peer="one process",
                peer_value=peer,
            )
            for figure, value, unit, peer in (
                ("accuracy", self.accuracy, "%", alone.accuracy),
                ("loss", self.loss, "nats", alone.loss),
                ("staleness", median(self.stalenesses), "updates", 0.0),
            )
        ]


def workers() -> ProcessPoolExecutor:
    """Pool of processes that train one run after another: a start takes longer than a training."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shoal.session.session", "sklearn.datasets", "torch.optim"])
    meetings = {number: context.Barrier(number) for number in NUM_WORKERS}
    return ProcessPoolExecutor(
        max(NUM_WORKERS), mp_context=context, initializer=prepare, initargs=(meetings,)
    )


def measure(task: str, seeds: int, pool: ProcessPoolExecutor, coordinator: str) -> list[str]:
    """Publish a task's rows, again after each seed; return the names of the cells in which
    `dc_asgd` is more than BAR_POINTS below one process."""
    alone = Cell(task=task, mode="alone", num_workers=1)
    cells = [Cell(task=task, mode=m, num_workers=n) for m in STRATEGIES for n in NUM_WORKERS]
    for seed in range(seeds):
        for cell in (alone, *cells):
            cell.run(pool, coordinator, seed)
        publish(f"accuracy_{task}", [row for cell in cells for row in cell.rows(alone)])
    for cell in cells:
        print(f"{cell.name}: {cell.accuracy - alone.accuracy:+.2f} points to one process")
    worst = alone.accuracy - BAR_POINTS
    return [cell.name for cell in cells if cell.mode == "dc_asgd" and cell.accuracy < worst]


def main() -> None:
    # Set this before torch counts the cores: every worker computes on one core.
    os.environ["OMP_NUM_THREADS"] = "1"
    missed = []
    with (
        tempfile.TemporaryDirectory() as name,
        patient_servers(Path(name)) as coordinator,
        workers() as pool,
    ):
        for task in sys.argv[1:2] or TASKS:
            seeds = int(sys.argv[2]) if len(sys.argv) > 2 else TASKS[task].num_seeds
            missed += measure(task, seeds, pool, coordinator)
    bar = f"the bar: dc_asgd within {BAR_POINTS} point of one process in every cell"
    print(f"missed {bar}: {', '.join(missed)}" if missed else f"met {bar}")


if __name__ == "__main__":
    main()
