"""`shoal demo`: starts a cluster, trains twice, and counts samples."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

from cyclopts import Parameter
from rich.console import Console

from shoal_client.demo.plan import PLANS, DemoPlan, Outcome
from shoal_client.demo.show import Bars, summary, table
from shoal_client.demo.training import DemoTraining
from shoal_client.local.access import LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig, last_lines
from shoal_client.local.directory import keep_logs, temporary_directory
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.leftovers import adopt_orphans, sweep
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_proto.errors import InternalError, InvalidSpec

DATA_TIMEOUT_S = 60.0
SWEEP_S = 3.0


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Starts etcd, a coordinator, two parameter servers and three workers on this machine and
    trains a small network on scikit-learn's digits: with asynchronous SGD through the parameter
    servers, then with DDP. After a quarter of each training a worker is killed (SIGKILL) and
    replaced. Exits with 0 only if both trainings reach 95 % on the test images and no process is
    left behind."""

    json_file: Annotated[Path | None, Parameter(name="--json", metavar="FILE")] = None
    """Write the figures to this file, as JSON."""
    directory: Annotated[Path | None, Parameter(name="--dir", metavar="DIRECTORY")] = None
    """Work in this empty directory, and keep its files at the end: logs, and each worker's record
    of its steps. By default a temporary directory is used; after a failure its logs are kept for
    a day."""
    insecure: bool = False
    """Start the cluster without TLS."""
    epochs: Annotated[int, Parameter(metavar="N")] = 80
    """Passes over the training images in each of the two trainings. With very few, 95 % is not
    reached."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InvalidSpec("bad --epochs", seen=str(self.epochs), expected="at least 1")
        if self.json_file is not None and not _can_write(self.json_file.absolute()):
            raise InvalidSpec(
                "bad --json",
                seen=str(self.json_file),
                expected="a file that may be written, in a directory that exists",
            )


def _can_write(file: Path) -> bool:
    if file.is_dir() or not file.parent.is_dir():
        return False
    return os.access(file if file.exists() else file.parent, os.W_OK)


def demo(config: DemoConfig) -> int:
    """Run the demo; return the exit code. Raises KeyboardInterrupt after Ctrl-C or SIGTERM."""
    adopt_orphans()
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    with _run_directory(config.directory) as directory:
        has_failed = True
        try:
            has_failed = not _run(config, directory)
        except KeyboardInterrupt:
            has_failed = False
            raise
        finally:
            if config.directory is None and has_failed:
                keep_logs(directory)
                if directory.exists():  # removed if there are no logs
                    print(f"shoal demo: the logs are in {directory}", file=sys.stderr)
    return int(has_failed)


def _run(config: DemoConfig, directory: Path) -> bool:
    console = Console()
    try:
        plans = [replace(plan, epochs=config.epochs) for plan in PLANS]
        outcomes = train(plans, directory, console, None if config.insecure else LocalTls())
        if config.json_file is not None:
            config.json_file.write_text(json.dumps([asdict(each) for each in outcomes], indent=2))
    finally:
        # Clean up even after a Ctrl-C.
        _ignore_interrupts()
        left = sweep(SWEEP_S)
        for pid, command in left.items():
            print(f"shoal demo: process {pid} is still running: {command}", file=sys.stderr)
    console.print(table(outcomes))
    console.print(summary(outcomes) if not left else "processes are still running")
    return all(each.good for each in outcomes) and not left


def train(
    plans: Sequence[DemoPlan], directory: Path, console: Console, tls: LocalTls | None
) -> Sequence[Outcome]:
    """Start a cluster in the directory, and train by each plan in turn. Raises ShoalError."""
    outcomes: list[Outcome] = []
    data = directory / "digits.npz"
    # The machine may have fewer cores than the demo has processes.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    config = LocalClusterConfig(
        directory=directory, environment=environment, restart=RestartPolicy(), tls=tls
    )
    with Supervisor() as supervisor, Bars(console) as bars:
        # Load the data while the cluster comes up: both take a second or two.
        writer = supervisor.spawn(_data_command(data, directory))
        bars.print_line("starting etcd, a coordinator and two parameter servers")
        with LocalCluster(config, say=bars.print_line) as cluster:
            bars.print_line(f"status page: {cluster.http_url}")
            _await_data(writer, directory)
            for plan in plans:
                training = DemoTraining(plan, cluster, directory / plan.strategy, data)
                outcomes.append(training.run(bars.follow(plan)))
    return outcomes


def _data_command(data: Path, directory: Path) -> ChildCommand:
    arguments = (sys.executable, "-P", "-m", "shoal.demo.data", str(data))
    return ChildCommand(name="data", arguments=arguments, log_path=directory / "data.log")


def _await_data(writer: Process, directory: Path) -> None:
    code = writer.wait(DATA_TIMEOUT_S)
    if code != 0:
        raise InternalError(
            "the demo could not load the digits",
            seen="still loading" if code is None else f"exit code {code}",
            fix="Is scikit-learn installed (pip install 'shoal[demo]')?\n"
            + last_lines(directory / "data.log"),
        )


def _run_directory(chosen: Path | None) -> AbstractContextManager[Path]:
    if chosen is None:
        return temporary_directory("shoal-demo-")
    if chosen.exists() and any(chosen.iterdir()):
        raise InvalidSpec("--dir is not empty", seen=str(chosen), expected="an empty directory")
    chosen.mkdir(parents=True, exist_ok=True)
    return nullcontext(chosen)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # A second Ctrl-C must not interrupt the cleanup, which has its own time limits.
    _ignore_interrupts()
    raise KeyboardInterrupt


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
