"""Machines of the comparisons: a lost machine ends as a whole, and a launcher that ends by itself
is started again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

WITHIN_S = 60.0
WITH_A_SESSION = (
    "test -e {place}/ignores && trap '' TERM;"
    " setsid sleep 600 & echo $! >> {place}/workers; echo up >> {place}/starts; wait"
)
"""A launcher whose worker leads a session of its own, as torchrun's do. It ignores SIGTERM if the
file `ignores` exists."""


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Any]:
    from training import machines as module  # noqa: PLC0415 - bench/ is on the path of a test only

    from shoal_client.local.process import ChildCommand  # noqa: PLC0415

    monkeypatch.setattr(module, "RELAUNCH_S", 0.0)

    def command(name: str) -> ChildCommand:
        return ChildCommand(
            name=name, arguments=("sh", "-c", WITH_A_SESSION.format(place=tmp_path))
        )

    plan = module.Plan(directory=tmp_path, pause_s=0.0, max_machines=4, checkpoint_every=1)
    anew = (tmp_path / "anew").touch if getattr(request, "param", "") == "anew" else None
    with module.Machines(plan, module.Running(command=command, start_anew=anew)) as running:
        yield running
    await_true(lambda: not any(is_running(pid) for pid in workers(tmp_path)))


def workers(place: Path) -> list[int]:
    path = place / "workers"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def is_running(pid: int) -> bool:
    """True unless the process is gone or is a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def await_true(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def num_starts(place: Path) -> int:
    path = place / "starts"
    return len(path.read_text().split()) if path.exists() else 0


def test_the_worker_of_a_lost_machine_ends(machines: Any, tmp_path: Path) -> None:
    """The worker ends although it has its own session, and nothing starts the machine again."""
    machines.join("machine-0")
    await_true(lambda: num_starts(tmp_path) == 1)
    (worker,) = workers(tmp_path)
    machines.lose("machine-0")
    await_true(lambda: not is_running(worker))
    assert machines.names == []
    assert machines.num_relaunches == 0


def test_a_launcher_that_ends_alone_is_started_again(machines: Any, tmp_path: Path) -> None:
    machines.join("machine-0")
    await_true(lambda: num_starts(tmp_path) == 1)
    (worker,) = workers(tmp_path)
    os.kill(machines.pid("machine-0"), 9)
    await_true(lambda: num_starts(tmp_path) == 2)
    os.kill(worker, 9)
    assert machines.num_relaunches == 1
    assert machines.names == ["machine-0"]


@pytest.mark.parametrize("machines", ["anew"], indirect=True)
def test_a_job_that_starts_anew_restarts_all_machines(machines: Any, tmp_path: Path) -> None:
    """A launcher that fails takes the job with it: no worker of before goes on."""
    from training.machines import descendants  # noqa: PLC0415

    for number in range(3):
        machines.join(f"machine-{number}")
    await_true(lambda: num_starts(tmp_path) == 3)
    before = workers(tmp_path)
    machines.lose("machine-2")
    failed = machines.pid("machine-0")
    (its_worker,) = descendants(failed)
    os.kill(failed, 9)
    os.kill(its_worker, 9)
    await_true(lambda: num_starts(tmp_path) == 5)
    await_true(lambda: not any(is_running(pid) for pid in before))
    assert (tmp_path / "anew").exists()
    assert machines.names == ["machine-0", "machine-1"]
    assert machines.num_relaunches == 1


def test_the_last_machine_that_has_trained_is_not_killed(machines: Any, tmp_path: Path) -> None:
    """No system without checkpoints could outlive that: the replay ends with the reason."""
    from training.changes import Change  # noqa: PLC0415
    from training.machines import STEPS_BEFORE, NotTraining, descendants  # noqa: PLC0415

    def trained(name: str) -> None:
        (worker,) = descendants(machines.pid(name))
        step = {"pid": worker, "agent": machines.pid(name), "formation": 1, "world_size": 1}
        lines = [
            json.dumps({**step, "at_s": time.monotonic(), "step": number})
            for number in range(STEPS_BEFORE)
        ]
        (tmp_path / f"steps-{worker}").write_text("".join(f"{line}\n" for line in lines))

    changes = [
        Change(at_s=0.0, machine="machine-1", joins=True),
        Change(at_s=0.0, machine="machine-0", joins=False),
    ]
    with ThreadPoolExecutor(max_workers=1) as pool:
        replay = pool.submit(machines.replay, ["machine-0"], changes, 1.0, 0.0)
        await_true(lambda: num_starts(tmp_path) == 1)
        trained("machine-0")
        with pytest.raises(NotTraining, match="no other machine has taken a step"):
            replay.result(WITHIN_S)
    assert machines.names == ["machine-0", "machine-1"]


STEPPING = """
import json, os, pathlib, sys, time
step = {"pid": os.getpid(), "agent": os.getppid(), "formation": 0, "world_size": 1}
with pathlib.Path(sys.argv[1], f"steps-{os.getpid()}").open("w") as file:
    for number in range(10**6):
        print(json.dumps({**step, "at_s": time.monotonic(), "step": number}), file=file, flush=True)
        time.sleep(0.01)
"""


def test_without_training_at_the_end_no_step_was_useful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: Any
) -> None:
    """The steps are lost with the state, however many were taken."""
    import trace as bench_trace  # noqa: PLC0415

    from recovery import Stuck  # noqa: PLC0415
    from training.changes import Change  # noqa: PLC0415
    from training.machines import Plan, Running  # noqa: PLC0415

    from shoal_client.local.process import ChildCommand  # noqa: PLC0415

    @contextmanager
    def stepping(plan: Plan) -> Iterator[Running]:
        arguments = (sys.executable, "-c", STEPPING, str(plan.directory))
        yield Running(command=lambda name: ChildCommand(name=name, arguments=arguments))

    def ends_without_state(*_: Any) -> None:
        raise Stuck("the state is lost")

    monkeypatch.setattr(bench_trace, "SYSTEMS", {"stepping": stepping})
    plan = Plan(directory=tmp_path / "run", pause_s=0.0, max_machines=1, checkpoint_every=1)
    start = Change(at_s=0.0, machine="machine-0", joins=True)
    monkeypatch.setattr(bench_trace, "result", lambda *_: (1, {}))
    figures, *_ = bench_trace.replay("stepping", plan, [start], 0.5, 0.0)
    assert figures["useful_steps"] > 0
    monkeypatch.setattr(bench_trace, "result", ends_without_state)
    again = replace(plan, directory=tmp_path / "again")
    figures, num_steps, weights = bench_trace.replay("stepping", again, [start], 0.5, 0.0)
    assert (figures["useful_steps"], figures["effective"], num_steps, weights) == (0, 0.0, 0, None)


def test_a_notice_comes_before_the_kill(machines: Any, tmp_path: Path) -> None:
    """A launcher that ends by SIGTERM is gone long before the kill that was announced."""
    machines.join("machine-0")
    await_true(lambda: num_starts(tmp_path) == 1)
    pid = machines.pid("machine-0")
    machines.lose("machine-0", notice_s=30.0)
    await_true(lambda: not is_running(pid))
    for worker in workers(tmp_path):
        os.kill(worker, 9)


def test_a_machine_under_notice_ends_with_the_run(machines: Any, tmp_path: Path) -> None:
    """The machine's launcher ignores SIGTERM, and the run ends before the kill: the fixture then
    waits until the worker has ended."""
    (tmp_path / "ignores").touch()
    machines.join("machine-0")
    await_true(lambda: num_starts(tmp_path) == 1)
    machines.lose("machine-0", notice_s=600.0)
    assert machines.names == []
    assert all(is_running(pid) for pid in workers(tmp_path))


def test_the_steps_of_a_dropped_worker_are_no_longer_read(tmp_path: Path) -> None:
    from training.steps import Steps  # noqa: PLC0415

    line = '{"at_s": 1.0, "pid": 7, "agent": 1, "formation": 1, "world_size": 1, "step": 3}\n'
    (tmp_path / "steps-7").write_text(line)
    steps = Steps(tmp_path)
    steps.read()
    newest = steps.newest()
    assert newest is not None and newest.step == 3
    steps.drop(7)
    steps.read()
    assert steps.newest() is None
    assert not (tmp_path / "steps-7").exists()


TERMINATED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from training import machines
from shoal_client.local.process import ChildCommand
place = Path(sys.argv[1])
machines.end_on_sigterm()
plan = machines.Plan(directory=place, pause_s=0.0, max_machines=4, checkpoint_every=1)
arguments = ("sh", "-c", sys.argv[3])
running = machines.Running(command=lambda name: ChildCommand(name=name, arguments=arguments))
with machines.Machines(plan, running) as found:
    found.join("machine-0")
    time.sleep(600)
"""


def test_a_bench_that_gets_sigterm_leaves_no_worker(tmp_path: Path) -> None:
    """The worker leads a session of its own: it would outlive the launcher that dies with the
    bench."""
    bench = Path(__file__).parents[2] / "bench"
    launcher = WITH_A_SESSION.format(place=tmp_path)
    arguments = (sys.executable, "-c", TERMINATED, str(tmp_path), str(bench), launcher)
    with subprocess.Popen(arguments) as started:
        await_true(lambda: num_starts(tmp_path) == 1)
        (worker,) = workers(tmp_path)
        try:
            started.send_signal(signal.SIGTERM)
            assert started.wait(WITHIN_S) == 128 + signal.SIGTERM
            assert not is_running(worker)
        finally:
            started.kill()
            if is_running(worker):
                os.kill(worker, signal.SIGKILL)
