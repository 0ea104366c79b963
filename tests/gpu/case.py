"""Parts that the cases share: a cluster, members in it, and their reports."""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu.machine import Machine
from gpu.member import Plan, train, train_alone
from gpu.models import Task
from support.collectives.strategy_runs import difference
from support.processes.ranks import Rank, Ranks

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

LIMITS = {"--heartbeat-s": 0.5, "--collective-s": 8.0, "--join-s": 40.0}
EXACT = 1e-5
"""Tolerance of fp32 weights if only the order of additions differs."""


@dataclass(kw_only=True)
class Case:
    """A case while it runs."""

    machine: Machine
    directory: Path
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Figures that are measured only on a GPU."""

    @property
    def patience_s(self) -> float:
        """Seconds to wait for any single event."""
        return 40.0 if self.machine.device == "cuda" else 90.0

    def plan(self, job: str, task: Task, **options: Any) -> Plan:
        """A plan for a member, without the member's name."""
        return Plan(
            machine=self.machine, directory=str(self.directory), job=job, task=task, **options
        )

    @contextmanager
    def cluster(self, *, num_servers: int = 0) -> Iterator[LocalCluster]:
        """A cluster of real processes."""
        number = len(list(self.directory.glob("cluster-*")))
        config = LocalClusterConfig(
            directory=self.directory / f"cluster-{number}",
            num_parameter_servers=num_servers,
            limits=LIMITS,
        )
        with LocalCluster(config) as running:
            yield running

    def on_gpu_only(self, name: str, value: Any) -> None:
        """Record a figure that has a meaning only on a GPU."""
        if self.machine.device == "cuda":
            self.figures[name] = value
        else:
            self.left_out.append(name)

    def alone(self, plan: Plan, num_steps: int) -> dict[str, torch.Tensor]:
        """The weights that one process reaches without Shoal's strategies."""
        with Ranks() as ranks:
            rank = ranks.start(train_alone, plan, num_steps)
            return weights_of(rank.expect("finished", self.patience_s))


def weights_of(finished: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights in the file that a process has reported."""
    found: dict[str, torch.Tensor] = torch.load(finished["weights"])
    return found


class Crew:
    """The members of one job: forked processes that report what they do."""

    def __init__(self, case: Case, ranks: Ranks, cluster: LocalCluster, plan: Plan) -> None:
        self._case, self._ranks = case, ranks
        self._plan = replace(plan, coordinator=cluster.coordinator)
        self.members: dict[str, Rank] = {}

    def start(self, name: str, body: Callable[..., None] = train, **changes: Any) -> Rank:
        """Start another member."""
        plan = replace(self._plan, member_id=name, index=len(self.members), **changes)
        self.members[name] = self._ranks.start(body, plan)
        return self.members[name]

    def start_all(self, count: int, faults: Mapping[str, Any] | None = None) -> None:
        """Start the members m0, m1, ... of the first generation."""
        for number in range(count):
            name = f"m{number}"
            self.start(name, desired_members=count, fault=(faults or {}).get(name))

    def expect(self, name: str, kind: str) -> dict[str, Any]:
        """The member's next report of this kind."""
        return self.members[name].expect(kind, self._case.patience_s)

    def trains(self, name: str, *, world_size: int = 0, after_step: int = -1) -> dict[str, Any]:
        """The member's first committed step after `after_step` with so many members."""
        while True:
            step = self.expect(name, "committed")
            if step["step"] > after_step and world_size in (0, step["world_size"]):
                return step

    def finish(self, *names: str) -> list[dict[str, Any]]:
        """Final reports of these members, each of which ended with exit code 0."""
        ends = [self.expect(name, "finished") for name in names]
        for name in names:
            code = self.members[name].join(self._case.patience_s)
            assert code == 0, f"{name} ended with {code}"
        return ends

    def steps(self, name: str, kind: str = "committed") -> list[dict[str, Any]]:
        """The member's reports of this kind, oldest first."""
        return [data for each, data in self.members[name].seen if each == kind]

    def resumed_s(self, names: Sequence[str], struck: Mapping[str, Any]) -> float:
        """Seconds from a fault to the first step that all these members have committed in a later
        generation."""
        firsts = []
        for name in names:
            before = [step for step in self.steps(name) if step["at_s"] <= struck["at_s"]]
            generation = before[-1]["generation"] if before else 0
            later = (s for s in self.steps(name) if s["generation"] > generation)
            firsts.append(next(step["at_s"] for step in later))
        return round(max(firsts) - float(struck["at_s"]), 3)

    def longest_cut_s(self, *names: str) -> float:
        """The longest cut of a generation's group on any of these members."""
        cuts = [cut["seconds"] for name in names for cut in self.steps(name, "cut")]
        return round(max(cuts, default=0.0), 3)

    def check_each_step_once(self, name: str) -> None:
        """Fail unless the member has committed each step, and none twice."""
        numbers = [step["step"] for step in self.steps(name)]
        first = numbers[0]
        assert numbers == list(range(first, first + len(numbers))), f"{name}: steps {numbers}"

    def check_alike(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Fail unless all these members have the same weights, bit for bit; return the weights."""
        ends = [self.steps(name, "finished")[-1] for name in names]
        first, *others = map(weights_of, ends)
        for name, other in zip(names[1:], others, strict=True):
            assert difference(first, other) == 0.0, f"{name} has other weights than {names[0]}"
        return first

    def check_as_alone(self, names: Sequence[str], tolerance: float = EXACT) -> float:
        """Fail unless these members have the weights of one process; return the largest
        difference."""
        weights = self.check_alike(names)
        num_steps = self.steps(names[0], "finished")[-1]["step"]
        found = difference(weights, self._case.alone(self._plan, num_steps))
        assert found < tolerance, f"{found:.3g} from the weights of one process: {self._plan.job}"
        return found


@contextmanager
def crew_of(case: Case, plan: Plan, *, num_servers: int = 0) -> Iterator[Crew]:
    """A job on a cluster of its own."""
    with case.cluster(num_servers=num_servers) as cluster, Ranks() as ranks:
        yield Crew(case, ranks, cluster, plan)


def run(name: str, settings: Path) -> None:
    """Run one case. Its figures are written to outcome.json beside the settings, and its error to
    error.txt."""
    directory = settings.parent
    given = json.loads(settings.read_text())
    # The cases import this module.
    entry = import_module(given["module"]).CASES[name]
    case = Case(machine=Machine(**given["machine"]), directory=directory)
    try:
        entry.run(case)
    except BaseException:
        (directory / "error.txt").write_text(traceback.format_exc())
        raise
    finally:
        outcome = {"figures": case.figures, "left_out": case.left_out}
        (directory / "outcome.json").write_text(json.dumps(outcome))
