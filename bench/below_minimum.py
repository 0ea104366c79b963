"""Recovery of a job that had fewer members than its minimum for ten minutes.

    make bench NAME=below_minimum
    .venv/bin/python bench/below_minimum.py --seconds 600 ddp fsdp pipeline    # at the same time

For each strategy, two launchers (`shoal run -n 1 --min 2`) train one job, at default time limits.
One worker is killed, and its launcher ends. The other worker waits, and the coordinator shows the
reason; after the given time a third launcher is started. `below_minimum_wait_STRATEGY`: time that
the survivor's process has waited. `below_minimum_resume_STRATEGY`: time from the start of
the third launcher, Python's and torch's imports included, to the first step of both workers.
`below_minimum_exactness_STRATEGY`: largest absolute difference between the final weights and the
weights of one process.
"""

import argparse
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from exactness import end
from recovery import Stuck
from rows import Row, publish
from training.jobs import START_S, ShoalJob, logs_in

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "fsdp", "pipeline")
STEPS_BEFORE = 50
LOOKS_EVERY_S = 2.0
WAITS_FOR = "1 more member, no limit"


class FewJob:
    """The job of one strategy."""

    def __init__(self, cluster: LocalCluster, directory: Path, strategy: str) -> None:
        self.strategy = strategy
        self.directory = directory / strategy
        self._members_url = f"{cluster.http_url}/api/v1/jobs/{strategy}/members"
        self._began_s = 0.0
        self.job = ShoalJob(
            cluster,
            self.directory,
            max_members=2,
            script=("on_exactness.py", strategy),
            restarts=False,
            num_workers=2,
            min_members=2,
        )

    def lose_one(self) -> None:
        """Kill one of the two workers; return once the other one waits. Raises Stuck."""
        self._await_both(STEPS_BEFORE, without=0)
        self._victim, self.survivor = self.job.steps.training(2, STEPS_BEFORE)
        os.kill(self._victim, signal.SIGKILL)
        give_up_s = time.monotonic() + START_S
        while not self.is_waiting():
            if time.monotonic() > give_up_s:
                raise Stuck(f"{self.strategy} does not wait:\n{logs_in(self.directory)}")
            time.sleep(0.1)
        self._began_s = time.monotonic()

    def is_waiting(self) -> bool:
        """True if the survivor is the only member, and waits for WAITS_FOR."""
        members = httpx.get(self._members_url, trust_env=False).raise_for_status().json()
        shown = [each["member"] for each in members]
        return [each["waiting_for"] for each in shown] == [WAITS_FOR] and (
            shown[0]["process"]["pid"] == self.survivor
        )

    def go_on(self) -> list[Row]:
        """Start a replacement, end the job once both have trained, and return the figures."""
        waited_s, started_s = time.monotonic() - self._began_s, time.monotonic()
        self.job.launch(1, max_restarts=0)
        self._await_both(1, without=self._victim)
        resume_s = time.monotonic() - started_s
        if self.survivor not in self.job.steps.training(2, 1):
            raise Stuck(f"the survivor of {self.strategy} is gone:\n{logs_in(self.directory)}")
        _, difference = end(self.job.steps, self.directory)
        figures = (
            ("wait", waited_s, "s"),
            ("resume", resume_s, "s"),
            ("exactness", difference, ""),
        )
        return [
            Row(metric=f"below_minimum_{name}_{self.strategy}", value=value, unit=unit, runs=1)
            for name, value, unit in figures
        ]

    def _await_both(self, num_steps: int, without: int) -> None:
        def train() -> bool:
            pids = self.job.steps.training(2, num_steps)
            return bool(pids) and without not in pids

        if not self.job.steps.await_true(train, START_S):
            raise Stuck(f"no two workers of {self.strategy} train:\n{logs_in(self.directory)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    asked = parser.parse_args()
    # With two threads on a busy machine, each small operation would wait until both are scheduled,
    # and the training of one process would take minutes.
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        cluster = stack.enter_context(LocalCluster(config))
        jobs = [FewJob(cluster, Path(name), each) for each in asked.strategies]
        for each in jobs:
            stack.enter_context(each.job)
        for each in jobs:
            each.lose_one()
        until_s = time.monotonic() + asked.seconds
        while time.monotonic() < until_s:
            time.sleep(min(LOOKS_EVERY_S, asked.seconds))
            if given_up := [each.strategy for each in jobs if not each.is_waiting()]:
                raise Stuck(f"{given_up} do not wait:\n{logs_in(Path(name) / given_up[0])}")
        for each in jobs:
            rows += each.go_on()
    publish("below_minimum", rows)


if __name__ == "__main__":
    main()
