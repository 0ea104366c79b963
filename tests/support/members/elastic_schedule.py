"""Kills, joins and drains of real members, drawn from a seed, and checks of the result."""

import math
import os
import random
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.processes.ranks import Rank, Ranks
from support.training import elastic_bodies
from support.training.elastic_bodies import Elastic
from support.training.local_sgd_bodies import LocalRun

from shoal.checkpoint.directory import complete
from shoal.data.order import Order
from shoal_client.local.cluster import LocalCluster

MARGIN_S, MAX_MARGIN_STEPS = 1.0, 150
"""Margin between the last step that the test has seen and the stop, at the members' pace.

The number of steps is limited, as each adds rounding errors. In float64 these are negligible, and a
test may allow more steps.
"""
PACED_STEPS = 10
STOP_STEPS = 12
"""Members stop at a multiple of this number, where every round of local steps ends."""


class Schedule:
    """Drives one job through changes, each awaited before the next."""

    def __init__(
        self,
        ranks: Ranks,
        run: Elastic | LocalRun,
        directory: Path,
        seed: int,
        body: Callable[..., None] = elastic_bodies.train,
        *,
        max_margin_steps: int = MAX_MARGIN_STEPS,
    ) -> None:
        self._ranks = ranks
        self._max_margin_steps = max_margin_steps
        self._body = body
        self._random = random.Random(seed)
        self._stop_file = directory / f"stop-{secrets.token_hex(4)}"
        self._run = replace(run, stop_file=str(self._stop_file))
        self._names = iter(f"m{number}" for number in range(1000))
        self._gates: dict[Rank, Path] = {}
        """Gates at which members of local SGD wait for each other before they leave."""
        self.alive: list[Rank] = []
        self.all: list[Rank] = []
        self.done: list[str] = []

    @property
    def job(self) -> str:
        return self._run.job

    @property
    def run_of_all(self) -> Elastic:
        """The options that all members share."""
        assert isinstance(self._run, Elastic)
        return self._run

    def start(self, count: int) -> None:
        """Start the members of the first generation, and wait until they train."""
        for _ in range(count):
            self.add()
        for rank in self.alive:
            rank.expect("committed")

    def add(self, **changes: Any) -> Rank:
        """Start one more member, with these changes to the options."""
        run = replace(self._run, member_id=next(self._names), **changes)
        gate = Path(f"{self._stop_file}.{run.member_id}")
        os.mkfifo(gate)
        rank = self._ranks.start(self._body, run)
        self._gates[rank] = gate
        self.alive.append(rank)
        self.all.append(rank)
        return rank

    def kill(self) -> None:
        """Kill a member, and wait until the others commit a step in a later generation."""
        victim = self._pick()
        victim.send_signal(signal.SIGKILL)
        assert victim.join() == -signal.SIGKILL
        self.await_change()
        self.done.append("kill")

    def lose(self) -> Rank:
        """Kill a member when the others are too few to continue; return one of the others."""
        victim = self._pick()
        victim.send_signal(signal.SIGKILL)
        assert victim.join() == -signal.SIGKILL
        self.done.append("lose")
        return self.alive[0]

    def join(self) -> None:
        """Add a member, and wait until it has committed a step with the others."""
        before = self.generation()
        self.add().expect("committed")
        self.await_change(before)
        self.done.append("join")

    def drain(self) -> None:
        """Drain a member by SIGTERM, and wait until the others commit a step without it."""
        leaver = self._pick()
        leaver.send_signal(signal.SIGTERM)
        assert leaver.expect("exits")["code"] == 143
        self.await_change()
        self.done.append("drain")

    def run(self, num_changes: int, *, smallest: int, largest: int) -> None:
        """Make random changes that keep the number of members within these bounds."""
        for _ in range(num_changes):
            possible = []
            if len(self.alive) > smallest:
                possible += [self.kill, self.kill, self.drain]
            if len(self.alive) < largest:
                possible += [self.join, self.join]
            self._random.choice(possible)()

    def stop(self) -> None:
        """Make all members stop at the same step, which none has reached yet."""
        margin_steps = self._margin_steps()
        for rank in self.alive:
            rank.catch_up()
        last = max(data["step"] for _, data in self.committed())
        draft = self._stop_file.with_suffix(".draft")
        at_step = -(-(last + margin_steps) // STOP_STEPS) * STOP_STEPS
        draft.write_text(str(at_step))
        draft.rename(self._stop_file)  # atomic, as members read the file at any moment

    def finish(self) -> Mapping[str, Any]:
        """Make all members stop; return their result, which must be the same."""
        self.stop()
        if isinstance(self._run, LocalRun):
            for rank in self.alive:
                rank.expect("stopped")
            for rank in self.alive:
                self._gates[rank].write_bytes(b"")
        finished = [rank.expect("finished") for rank in self.alive]
        for rank in self.alive:
            assert rank.join() == 0
        for each in finished[1:]:
            assert each == finished[0], "members do not agree on the result"
        return finished[0]

    def _margin_steps(self) -> int:
        """Measure the next steps; return the number of steps in about a second."""
        first = self.alive[0]
        first.catch_up()
        began_s = time.monotonic()
        for _ in range(PACED_STEPS):
            first.expect("committed")
        step_s = (time.monotonic() - began_s) / PACED_STEPS
        return min(self._max_margin_steps, math.ceil(MARGIN_S / step_s))

    def _pick(self) -> Rank:
        victim = self._random.choice(self.alive)
        self.alive.remove(victim)
        return victim

    def generation(self) -> int:
        return max(data["generation"] for _, data in self.committed())

    def await_change(self, before: int | None = None) -> None:
        before = self.generation() if before is None else before
        for rank in self.alive:
            while True:
                seen = [data for kind, data in rank.seen if kind == "committed"]
                if seen and seen[-1]["generation"] > before:
                    break
                rank.expect("committed")

    def committed(self) -> list[tuple[Rank, dict[str, Any]]]:
        """Return the reports of all members about their committed steps."""
        return [
            (rank, data) for rank in self.all for kind, data in rank.seen if kind == "committed"
        ]


def elastic(cluster: LocalCluster, job: str, **changes: Any) -> Elastic:
    """Make the options for the members of a job, whose name gets a random suffix."""
    return Elastic(
        coordinator=cluster.coordinator,
        job=f"{job}-{secrets.token_hex(4)}",
        member_id="",
        **{"batch_size": 24, **changes},
    )


def lose_all(schedule: Schedule, directory: Path, num_checkpoints: int) -> int:
    """Kill all members once there are `num_checkpoints`; return the newest one's step."""
    while len(complete(directory)) < num_checkpoints:
        schedule.alive[0].expect("committed")
    for rank in schedule.alive:
        rank.send_signal(signal.SIGKILL)
    return max(complete(directory))


def check_no_trace(schedule: Schedule, run: Elastic, tolerance: float) -> Mapping[str, Any]:
    """Make all members stop. Check that the weights are those of one process, and that each sample
    was used once."""
    finished = schedule.finish()
    check_same_weights(finished, run, tolerance)
    for rank in schedule.all:
        rank.drain()
    check_each_sample_once(schedule.all, finished["step"], elastic_bodies.order(run.batch_size))
    return finished


def check_same_weights(finished: Mapping[str, Any], run: Elastic, tolerance: float) -> float:
    """Check that the result is that of one process; return the largest difference."""
    expected = elastic_bodies.one_process(run, finished["step"])
    own = {name: torch.tensor(weights) for name, weights in finished["weights"].items()}
    assert set(own) == set(expected)
    largest = max(float((own[name] - expected[name]).abs().max()) for name in expected)
    assert largest < tolerance, largest
    return largest


def check_each_sample_once(ranks: list[Rank], num_steps: int, order: Order) -> None:
    """Check that each step used exactly its own part of the epoch's order.

    A step that was rolled back is repeated in a later generation; its last attempt counts.
    """
    valid: dict[int, int] = {}
    for rank in ranks:
        for kind, data in rank.seen:
            if kind == "committed":
                valid[data["step"]] = max(data["generation"], valid.get(data["step"], 0))
    shares: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for rank in ranks:
        for kind, data in rank.seen:
            if kind == "tried" and valid.get(data["step"]) == data["generation"]:
                shares[data["step"]][data["share"]] = data["indices"]
    for step in range(num_steps):
        parts = shares[step]
        counts = {count for _, count in parts}
        assert len(counts) == 1, f"step {step} was shared in two ways"
        assert {index for index, _ in parts} == set(range(counts.pop())), f"step {step}"
        taken = [index for share in sorted(parts) for index in parts[share]]
        epoch, start, stop = order.span(step)
        assert taken == order.indices(epoch, start, stop).tolist(), f"step {step}"
