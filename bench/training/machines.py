"""Machines of a job on one host, for every compared system: they join and are lost.

A machine is what a host of a cluster would run: Shoal's launcher with its worker, torchrun's agent
with its worker, or a replica group of torchft. The services that all machines share (coordinator
and etcd, the store of the rendezvous, the lighthouse) are separate processes and are never lost.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from torch.distributed import TCPStore
from training.changes import Change
from training.jobs import (
    TUNED_RDZV,
    await_file,
    logs_in,
    python_script,
    shoal_launcher,
    torchrun_agent,
)
from training.steps import Step, Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import ChildCommand, Process, Supervisor

RELAUNCH_S = 1.0
"""Delay after which a launcher that ended, or the job, is restarted while its machine is present,
as by a scheduler."""
START_S = 300.0
"""Limit of the start of all machines, which import torch on the same cores."""
STEPS_BEFORE = 30
"""Steps that all first machines take together before the clock starts."""
TORCHFT_PYTHON = os.environ.get("SHOAL_BENCH_TORCHFT", sys.executable)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of a run that some systems need."""

    directory: Path
    """Folder of the job: logs, steps, checkpoints, the result."""
    pause_s: float
    """Part of each step in which the worker waits, as for a device."""
    max_machines: int
    checkpoint_every: int
    """Steps between checkpoints of a system that loads one after each change."""
    max_restarts: int = 3
    """Most restarts of a worker by its launcher."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A system whose shared services run, ready for machines."""

    command: Callable[[str], ChildCommand]
    """Returns the command of the machine with this name."""
    services: Mapping[str, int] = field(default_factory=dict)
    """Process ids of the shared services, by name."""
    start_anew: Callable[[], None] | None = None
    """Called after a machine's launcher failed, before all machines are started again; None if
    that launcher alone is restarted."""
    has_checkpoints: bool = False
    """True if the training outlives the loss of all machines."""


@contextmanager
def shoal_ddp(plan: Plan) -> Iterator[Running]:
    script = ("on_exactness.py", str(plan.directory), "ddp", str(plan.pause_s))
    with _shoal(plan, script) as running:
        yield running


@contextmanager
def shoal_fsdp(plan: Plan) -> Iterator[Running]:
    """FSDP with two copies of each part, since a second machine may be lost before the copies are
    complete again."""
    script = ("on_exactness.py", str(plan.directory), "fsdp", str(plan.pause_s), "2")
    with _shoal(plan, script) as running:
        yield running


@contextmanager
def shoal_async_sgd(plan: Plan) -> Iterator[Running]:
    """The training of bench/async_trace.py, whose updates can be counted."""
    script = ("on_counted_samples.py", str(plan.directory), str(plan.pause_s))
    with _shoal(plan, script, num_servers=2) as running:
        yield running


@contextmanager
def _shoal(plan: Plan, script: tuple[str, ...], num_servers: int = 0) -> Iterator[Running]:
    config = LocalClusterConfig(
        directory=plan.directory / "cluster", num_parameter_servers=num_servers
    )
    numbers = {"-n": 1, "--desired": 1, "--min": 1, "--max": plan.max_machines}
    with LocalCluster(config) as cluster:
        yield Running(
            command=lambda name: shoal_launcher(
                cluster.coordinator,
                plan.directory,
                name=name,
                job=plan.directory.name,
                options={**numbers, "--max-restarts": plan.max_restarts},
                script=script,
            ),
            services={name: process.pid for name, process in cluster.processes.items()},
        )


@contextmanager
def torchrun(plan: Plan) -> Iterator[Running]:
    """Torchrun. When an agent fails, torch closes the rendezvous of its id for good. The job then
    starts anew under another id, from its checkpoint, as a scheduler or an operator would do."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    attempts = [0]

    def start_anew() -> None:
        attempts[0] += 1

    yield Running(
        start_anew=start_anew,
        has_checkpoints=True,
        command=lambda name: torchrun_agent(
            plan.directory,
            name=name,
            port=store.port,
            max_nodes=plan.max_machines,
            conf=f"is_host=false,{TUNED_RDZV}",
            attempt=attempts[0],
            script=(
                *("on_exactness_torchrun.py", str(plan.directory)),
                *(str(plan.pause_s), str(plan.checkpoint_every)),
            ),
        ),
    )


@contextmanager
def torchft(plan: Plan) -> Iterator[Running]:
    here = (TORCHFT_PYTHON, plan.directory)
    with Supervisor(grace_s=0.5) as supervisor:
        arguments = ("on_torchft.py", "lighthouse", str(plan.directory))
        lighthouse = supervisor.spawn(python_script(*here, "lighthouse", *arguments))
        await_file(plan.directory / "lighthouse")
        yield Running(
            command=lambda name: python_script(
                *(*here, name, "on_exactness_torchft.py"),
                *(str(plan.directory), str(plan.pause_s), name),
            ),
            services={"lighthouse": lighthouse.pid},
        )


@contextmanager
def one_process(plan: Plan) -> Iterator[Running]:
    yield Running(
        command=lambda name: python_script(
            *(sys.executable, plan.directory, name, "on_exactness_alone.py"),
            *(str(plan.directory), str(plan.pause_s)),
        )
    )


SYSTEMS: Mapping[str, Callable[[Plan], AbstractContextManager[Running]]] = {
    "shoal-ddp": shoal_ddp,
    "shoal-fsdp": shoal_fsdp,
    "torchrun": torchrun,
    "torchft": torchft,
    "one-process": one_process,
}
ONE_PROCESS = "one-process"


class NotTraining(RuntimeError):
    """Raised if the machines do not train within a time limit."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A run that followed the changes of a trace."""

    start_s: float
    """Time by `time.monotonic` at which the first machines trained."""
    num_changes: int
    steps: list[Step]
    """Steps of all workers, in no order."""


class Machines:
    """The present machines of a job; all are stopped at the end of the `with` block."""

    def __init__(self, plan: Plan, running: Running) -> None:
        self._command, self._start_anew = running.command, running.start_anew
        self._has_checkpoints = running.has_checkpoints
        self._directory = plan.directory
        self._present: dict[str, Process] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._supervisor = Supervisor(on_exit=self._exited, grace_s=2.0)
        self.steps = Steps(plan.directory)
        self.num_relaunches = 0

    def __enter__(self) -> Self:
        self._supervisor.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closing = True
            self._present = {}
        # Workers of torchrun lead sessions of their own: they outlive their agent. A machine that
        # has got its notice is no longer present, and still runs.
        left = [pid for each in self._supervisor.running for pid in descendants(each.pid)]
        self._supervisor.close()
        kill([*left, *filter(self._is_worker, self.steps.by_pid)])

    def _is_worker(self, pid: int) -> bool:
        """True if the process still runs this job's script: process ids are reused."""
        try:
            return str(self._directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return False

    def join(self, name: str) -> Process:
        """Start a machine."""
        with self._lock:
            process = self._present[name] = self._supervisor.spawn(self._command(name))
            return process

    def lose(self, name: str, notice_s: float = 0.0) -> None:
        """SIGKILL all processes of a machine, with a SIGTERM `notice_s` before."""
        with self._lock:
            process = self._present.pop(name)
        if notice_s:
            process.terminate()
            later = threading.Timer(notice_s, kill_machine, (process,))
            later.daemon = True
            later.start()
        else:
            kill_machine(process)

    def replay(
        self, first: Sequence[str], later: Iterable[Change], length_s: float, notice_s: float
    ) -> Replayed:
        """Start the first machines; once they train, make the changes, for `length_s`."""
        for name in first:
            self.join(name)
        self.await_training(len(first), STEPS_BEFORE, START_S)
        start_s = time.monotonic()
        num_changes = self._follow(later, start_s, length_s, notice_s)
        self.steps.read()
        steps = [step for own in self.steps.by_pid.values() for step in own]
        return Replayed(start_s=start_s, num_changes=num_changes, steps=steps)

    def _follow(
        self, changes: Iterable[Change], start_s: float, length_s: float, notice_s: float
    ) -> int:
        """Make the changes at their times. Returns after `length_s`, with the number of changes
        made. Raises NotTraining instead of a loss that no system without checkpoints could
        outlive."""
        number = 0
        for change in changes:
            if change.at_s >= length_s:
                break
            time.sleep(max(0.0, start_s + change.at_s - time.monotonic()))
            if change.joins:
                self.join(change.machine)
            elif self._has_checkpoints or self._others_have_trained(change.machine):
                self.lose(change.machine, notice_s)
            else:
                raise NotTraining(
                    f"at {change.at_s:g} s {change.machine} is to be lost, and no other machine has"
                    " taken a step: starts take longer here than the changes assume. Measure on a"
                    " less busy machine."
                )
            number += 1
            print(f"{self._directory.name}: {change}", flush=True)
        time.sleep(max(0.0, start_s + length_s - time.monotonic()))
        return number

    def _others_have_trained(self, name: str) -> bool:
        """True if a worker that now runs on another machine has taken a step."""
        self.steps.read()
        others = [self.pid(other) for other in self.names if other != name]
        pids = {*others, *(pid for each in others for pid in descendants(each))}
        return not pids.isdisjoint(self.steps.by_pid)

    def await_training(self, num_machines: int, num_steps: int, within_s: float) -> None:
        """Return once the machines have taken `num_steps` steps together. Raises NotTraining."""
        if not self.steps.await_true(
            lambda: bool(self.steps.training(num_machines, num_steps)), within_s
        ):
            raise NotTraining(f"no {num_machines} machines train:\n{logs_in(self._directory)}")

    def pid(self, name: str) -> int:
        """Process id of a machine's launcher, or of its worker if it has none."""
        with self._lock:
            return self._present[name].pid

    @property
    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._present)

    def _exited(self, process: Process) -> None:
        threading.Thread(target=self._relaunch, args=(process,), daemon=True).start()

    def _relaunch(self, process: Process) -> None:
        time.sleep(RELAUNCH_S)
        with self._lock:
            if self._closing or self._present.get(process.name) is not process:
                return
            if process.exit_code == 0 and (self._directory / "stop").exists():
                return  # The training has ended.
            self.num_relaunches += 1
            names = [process.name]
            if self._start_anew is not None:
                self._start_anew()
                names = list(self._present)
                for each in self._present.values():
                    kill_machine(each)
            for name in names:
                self._present[name] = self._supervisor.spawn(self._command(name))


def end_on_sigterm() -> None:
    """Let SIGTERM end this program by SystemExit, as SIGINT does by KeyboardInterrupt.

    Otherwise the program ends at once: workers of torchrun, which outlive their agents, then train
    for ever, and the temporary folder stays.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def kill_machine(process: Process) -> None:
    """SIGKILL a machine's launcher and its descendants, unless it has ended."""
    if process.exit_code is not None:
        return
    family = descendants(process.pid)
    process.kill()
    kill(family)


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    found = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listing.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [each for child in children for each in (child, *descendants(child))]
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
