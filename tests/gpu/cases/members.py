"""Joins and drains as a user requests them: `shoal run` and `shoal drain`."""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu import script
from gpu.case import EXACT, Case, weights_of
from gpu.member import Plan
from gpu.models import chains
from support.collectives.strategy_runs import difference

from shoal_client.local.cluster import LocalCluster

DRAINED = 143


def join_and_drain(case: Case) -> None:
    """A third member joins two, and the first is drained, with ddp and fsdp: no member loses a
    step."""
    with case.cluster() as cluster:
        for strategy in ("ddp", "fsdp"):
            _join_and_drain(case, cluster, strategy)


def _join_and_drain(case: Case, cluster: LocalCluster, strategy: str) -> None:
    folder = case.directory / strategy
    folder.mkdir()
    task = chains(1024 if case.machine.full else 24)
    stop_file = folder / "stop"
    plan = case.plan(
        f"commands-{strategy}", task, strategy=strategy, stop_file=str(stop_file), pace_s=0.02
    )
    (folder / "plan").write_bytes(pickle.dumps(plan))
    events = Events(case, folder)
    with _launched(cluster, plan, folder, 2) as first:
        events.await_training(2)
        with _launched(cluster, plan, folder, 1) as second:
            # The launcher's GPU is the one of its first worker.
            events.await_training(3)
            leaver = events.of("joined")[0]["member"]
            asked = ("--job", plan.job, "--coordinator", cluster.coordinator)
            _command("drain", leaver, *asked, "--http", cluster.http_url)
            events.await_training(2)
            stop_file.touch()
            assert second.wait(case.patience_s) == 0, events.logs()
        assert first.wait(case.patience_s) == 0, events.logs()
    assert not events.of("missed"), f"a planned change broke steps: {events.of('missed')[:3]}"
    ends = events.of("finished")
    assert len(ends) == 2, events.logs()
    expected = case.alone(plan, ends[0]["step"])
    found = max(difference(weights_of(end), expected) for end in ends)
    assert found < EXACT, f"{found:.3g} from the weights of one process under {strategy}"
    case.figures[f"{strategy}_steps"] = ends[0]["step"]
    case.figures[f"{strategy}_difference"] = float(f"{found:.2g}")


@contextmanager
def _launched(
    cluster: LocalCluster, plan: Plan, folder: Path, count: int
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `shoal run` with so many workers of the job."""
    number = len(list(folder.glob("launcher-*.log")))
    with (folder / f"launcher-{number}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "shoal_client", "run", "-n", str(count)),
                *("--job", plan.job, "--coordinator", cluster.coordinator),
                *("--desired", "2", "--max", "3", script.__file__, str(folder)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.terminate()


def _command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal_client", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Events:
    """Events that the workers have written, one file for each process."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of this kind, oldest first."""
        found: list[Mapping[str, Any]] = []
        for path in self._folder.glob("events-*"):
            text = path.read_text()
            found += map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        return sorted(
            (dict(e) for e in found if e["kind"] == kind), key=lambda e: float(e["told_s"])
        )

    def await_training(self, world_size: int) -> None:
        """Wait until the last five steps have so many members."""
        deadline_s = time.monotonic() + self._case.patience_s
        while True:
            last = self.of("committed")[-5 * world_size :]
            sizes = {step["world_size"] for step in last}
            if len(last) == 5 * world_size and sizes == {world_size}:
                return
            assert time.monotonic() < deadline_s, f"no {world_size} members train:\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of the launchers' output."""
        return "\n".join(path.read_text()[-3000:] for path in self._folder.glob("launcher-*.log"))
