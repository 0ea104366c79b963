"""Members that publish weights and readers that install them, as processes that may be killed.

Each weight of the version of step n is -n * RATE, so a mixture of two versions shows. A process
writes each event to its journal, as a line of JSON, before it continues.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import structlog
import torch
from support.network.namespaces import Host
from torch import Tensor, nn

import shoal
from shoal.weights.series import PendingPublication
from shoal_client.weights.publisher import SeriesPublisher
from shoal_client.weights.stores import WeightStores
from shoal_proto.errors import DeadlineExceeded, Regressed, ShoalError

JOB, NAME = "rl", "policy"
SERIES = f"{JOB}/{NAME}"
RATE = 2.0**-10
WIDTH = 300_000
STEP_S = 0.15
"""Pause between two steps, and so between two versions."""
KEEP = 3
ENDED_BY_ERROR = 3
FETCH_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a process of a campaign."""

    name: str
    coordinator: str
    directory: Path
    host: Host | None = None
    life: int = 0
    """Number of the process among those of this name."""

    @property
    def log(self) -> Path:
        """Path of the process's journal."""
        return self.directory / f"{self.name}.jsonl"

    @property
    def dies(self) -> Path:
        """Path of a file; while it exists, the process dies in the middle of its work."""
        return self.directory / f"{self.name}.dies"


class CountedSteps(nn.Module):
    """A model whose gradients are all 1 if its inputs are all 1."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, WIDTH), nn.Linear(8, 5, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.wide(inputs).sum(1) + self.narrow(inputs).sum(1)  # type: ignore[no-any-return]


class Journal:
    """A file of JSON lines. Any thread may write to it."""

    def __init__(self, setup: Setup) -> None:
        self._file: TextIO = setup.log.open("a", buffering=1)
        self._life = setup.life
        self._lock = threading.Lock()

    def note(self, **what: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"t": time.monotonic(), "life": self._life, **what}) + "\n")


def _enter(setup: Setup) -> None:
    """Prepare a new process: it dies with its parent, and has its own log and network."""
    # Die with the parent process, which ends with the process that runs the campaign.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(137)
    with (setup.directory / f"{setup.name}.log").open("ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if setup.host is not None:
        setup.host.enter()
    os.environ["GRPC_VERBOSITY"] = "NONE"
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(20))


def _dying_before(cls: type, name: str, setup: Setup) -> None:
    """Patch the method so that the process dies before a call of it while `setup.dies` exists."""
    real: Callable[..., Any] = getattr(cls, name)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if setup.dies.exists():
            setup.dies.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **more)

    setattr(cls, name, call)


def train(setup: Setup) -> None:
    """Run a member that publishes after each step.

    If `setup.dies` exists, it dies when its bytes are on the servers and its part is not yet
    submitted.
    """
    _enter(setup)
    _dying_before(SeriesPublisher, "_contribute", setup)
    journal = Journal(setup)
    try:
        _train(setup, journal)
    except ShoalError as error:
        journal.note(what="ended", error=type(error).__name__, text=str(error)[:500])
        # The campaign restarts the process, as the launcher of a real run does.
        os._exit(ENDED_BY_ERROR)


def _train(setup: Setup, journal: Journal) -> None:
    model = CountedSteps()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    address = None if setup.host is None else setup.host.address
    with shoal.join(
        JOB,
        coordinator=setup.coordinator,
        member_id=setup.name,
        min_members=1,
        max_members=2,
        desired_members=2,
        address=address,
    ) as session:
        model, optimizer = session.distribute(model, optimizer, strategy="ddp")
        series = session.series(NAME, keep=KEEP)
        data = torch.ones(16 * 1000, 8)
        for batch in session.batches(data, global_batch_size=16, epochs=1_000_000):
            with session.step() as step:
                session.backward(model(batch.inputs).sum() / len(batch.inputs))
            if not step.committed:
                continue
            ticket = series.publish(metadata={"by": os.getpid()})
            threading.Thread(target=_await, args=(ticket, journal), daemon=True).start()
            time.sleep(STEP_S)


def _await(ticket: PendingPublication, journal: Journal) -> None:
    try:
        version = ticket.wait("committed", timeout=FETCH_S)
    except ShoalError as error:
        name = type(error).__name__
        journal.note(what="failed", step=ticket.step, error=name, text=str(error)[:300])
        return
    if version is not None:
        found = {"number": version.number, "epoch": version.epoch, "digest": version.digest}
        journal.note(what="committed", step=version.step, **found)


def read(setup: Setup) -> None:
    """Run a reader that installs the newest version again and again, alternately into its own
    tensors and as views of what it fetched.

    If `setup.dies` exists, it dies with a lease and nothing fetched.
    """
    _enter(setup)
    _dying_before(WeightStores, "fetch", setup)
    journal = Journal(setup)
    target = {name: torch.empty_like(each) for name, each in CountedSteps().state_dict().items()}
    with shoal.subscribe(SERIES, coordinator=setup.coordinator, reader=setup.name) as series:
        journal.note(what="started")
        count = 0
        while True:
            count += 1
            _install(series, target, journal, copies=count % 2 == 0)


def _install(series: Any, target: dict[str, Tensor], journal: Journal, *, copies: bool) -> None:
    try:
        version = series.wait(timeout=FETCH_S)
        if copies:
            series.fetch(version, into=target)
            state = target
        else:
            weights = series.fetch(version)
            state = dict(weights)
    except Regressed as error:
        journal.note(what="regressed", text=str(error))
        return
    except DeadlineExceeded as error:
        journal.note(what="late", text=str(error)[:300])
        return
    except ShoalError as error:
        # The version was dropped, or none of its holders can be reached.
        journal.note(what="not fetched", error=type(error).__name__, text=str(error)[:300])
        return
    values = {value.item() for each in state.values() for value in (each.min(), each.max())}
    found = {"number": version.number, "epoch": version.epoch, "digest": version.digest}
    is_whole = values == {-version.step * RATE}
    if not copies:
        series.installed(weights)
    journal.note(what="installed", step=version.step, is_whole=is_whole, **found)


__all__ = ["JOB", "SERIES", "Setup", "read", "train"]
