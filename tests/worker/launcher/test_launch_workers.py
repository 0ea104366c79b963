"""`shoal run` as users see it: a process, its workers, its signals, its exit code.

The coordinator is a gRPC server that receives reports and keeps no jobs.
"""

import ctypes
import errno
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from support.processes import commands
from support.processes.commands import is_alive, read_until

from shoal.launcher import worker_slots
from shoal.launcher.launcher import Launcher
from shoal.launcher.run_config import RunConfig
from shoal.membership.join_config import admission_s
from shoal_client.cli import installed_commands, read_config
from shoal_client.host.stop_orders import StopOrders
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_client.local.worker_logs import WorkerLog, log_path, log_root
from shoal_proto.errors import (
    Fenced,
    InvalidSpec,
    JobFinished,
    MemberDrained,
    PeersUnreachable,
    ProposalConflict,
    ShoalError,
    StateLost,
    Unavailable,
    UnknownJob,
)
from shoal_proto.status import to_detail, to_status
from shoal_proto.v1.membership_pb2 import (
    Ack,
    BeatReply,
    GetJobRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JobStanding,
    ReportExitRequest,
    ReportHaltRequest,
)
from shoal_proto.v1.membership_pb2_grpc import (
    MembershipServicer,
    add_MembershipServicer_to_server,
)

DEADLINE_S = 30.0
finish = partial(commands.finish, within_s=DEADLINE_S)
PTRACE_SEIZE = 0x4206


class ExitBook(MembershipServicer):
    def __init__(self) -> None:
        self.refused: dict[str, ShoalError] = {}
        """Error with which the heartbeats of each incarnation are refused."""
        self.reports: queue.SimpleQueue[ReportExitRequest] = queue.SimpleQueue()
        self.secrets: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Secrets by which the launcher proves that it started the reported processes."""
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Exits and halts, in the order of their reports."""
        self.beats: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        """Steps of each member, for each heartbeat call."""
        self.lost: ShoalError | None = None
        """Error of the job if its state is lost."""
        self.phase = "running"
        self.has_begun = False
        """True once a worker was reported; until then there is no such job."""
        self.members: tuple[str, ...] = ()
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Jobs whose state the launcher requested."""
        self.exits_answered = threading.Event()
        self.exits_answered.set()
        self.goes_on = False
        """True if a worker that exits with 0 leaves a job that is not finished."""

    def ReportExit(self, request: ReportExitRequest, context: grpc.ServicerContext) -> Ack:
        self.has_begun = True
        self.reports.put(request)
        self.secrets.put(request.launch_secret)
        self.events.put(f"{request.pid} {request.exit_code}")
        self.exits_answered.wait(DEADLINE_S)
        lost = to_detail(self.lost) if self.lost is not None else None
        if not request.exit_code and not self.goes_on:
            self.phase = "finished"
        return Ack(phase=self.phase, lost=lost)

    def ReportHalt(self, request: ReportHaltRequest, context: grpc.ServicerContext) -> Ack:
        self.has_begun = True
        assert request.host == socket.gethostname()
        self.events.put(f"{request.pid} {'halted' if request.halted else 'goes on'}")
        return Ack()

    def Heartbeat(self, request: HeartbeatRequest, context: grpc.ServicerContext) -> HeartbeatReply:
        self.has_begun = True
        self.beats.put({beat.token.member_id: beat.step for beat in request.beats})
        errors = [self.refused.get(beat.token.incarnation) for beat in request.beats]
        return HeartbeatReply(
            replies=[BeatReply(error=to_detail(e)) if e else BeatReply() for e in errors]
        )

    def GetJob(self, request: GetJobRequest, context: grpc.ServicerContext) -> JobStanding:
        if not self.has_begun:
            _no_job(request.job, context)
        self.asked.put(request.job)
        return JobStanding(phase=self.phase, member_ids=self.members)


def _no_job(job: str, context: grpc.ServicerContext) -> NoReturn:
    code, text, metadata = to_status(UnknownJob(f"no job {job}"))
    context.set_trailing_metadata(metadata)
    context.abort(code, text)
    raise AssertionError("abort raises")


@pytest.fixture
def book() -> ExitBook:
    return ExitBook()


@contextmanager
def serving(book: ExitBook, port: int = 0) -> Iterator[str]:
    """Serve a coordinator that records in `book`; yield its address."""
    with futures.ThreadPoolExecutor(2) as answering:
        server = grpc.server(answering)
        add_MembershipServicer_to_server(book, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.fixture
def coordinator(book: ExitBook) -> Iterator[str]:
    with serving(book) as address:
        yield address


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shoal_run(tmp_path: Path, coordinator: str) -> Iterator[Run]:
    """Function that starts `shoal run OPTIONS script.py` with the script's text. Its processes are
    killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(
        script: str | None, *options: str, arguments: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        target: tuple[str, ...] = ()
        if script is not None:
            path = tmp_path / "script.py"
            path.write_text(script)
            target = (str(path), *arguments)
        environment = {**os.environ, "SHOAL_COORDINATOR": coordinator}
        for key in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"):
            environment.pop(key, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal_client", "run", *options, *target],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


SHOW = """
import os, sys
keys = ("COORDINATOR", "JOB", "MEMBER_ID", "MIN_MEMBERS", "MAX_MEMBERS", "DESIRED_MEMBERS")
print(*(os.environ["SHOAL_" + key] for key in keys), *sys.argv[1:], sep="|")
print("threads", os.environ["OMP_NUM_THREADS"])
print("kept", os.environ["MALLOC_TRIM_THRESHOLD_"])
# The launcher has found a coordinator: workers wait for it if it is unavailable later.
assert os.environ["SHOAL_ADMISSION_S"] == "86400"
"""

WAIT = "import os, signal; print('pid', os.getpid(), flush=True); signal.pause()"


@pytest.mark.long
def test_workers_know_their_job(shoal_run: Run, coordinator: str) -> None:
    """The environment of a worker has the job, the bounds and an id of its own; its lines carry the
    id."""
    code, output = finish(
        shoal_run(SHOW, "-n", "3", "--job", "j", "--min", "2", arguments=("--lr", "1"))
    )
    assert code == 0, output
    shown = [line.split("] ", 1) for line in output.splitlines() if "|" in line]
    assert len({member for member, _ in shown}) == 3
    for prefix, text in shown:
        member = prefix.removeprefix("[")
        assert text == f"{coordinator}|j|{member}|2|3|3|--lr|1"
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert output.count(f"threads {threads}\n") == 3
    assert output.count(f"kept {1 << 30}\n") == 3
    assert f"OMP_NUM_THREADS={threads}" in output


@pytest.mark.sampled()
@pytest.mark.parametrize(("workers", "expected"), [("1", {"pod"}), ("2", {"pod-0", "pod-1"})])
def test_a_given_member_id_is_kept(
    shoal_run: Run, monkeypatch: pytest.MonkeyPatch, workers: str, expected: set[str]
) -> None:
    """$SHOAL_MEMBER_ID names the worker: the member of a pod has the pod's name."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "pod")
    code, output = finish(
        shoal_run("import os; print('is', os.environ['SHOAL_MEMBER_ID'])", "-n", workers)
    )
    assert code == 0, output
    assert {
        line.rpartition("is ")[2] for line in output.splitlines() if "] is " in line
    } == expected


@pytest.mark.parametrize("member_id", ["../out", "a/b", "a" * 127])
def test_a_bad_member_id_is_refused_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch, member_id: str
) -> None:
    """The id of one of two workers has two more characters. A log file has the id as its name."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", member_id)
    with pytest.raises(InvalidSpec, match="bad SHOAL_MEMBER_ID"):
        read_config(["run", "-n", "2", "train.py"], installed_commands())


@pytest.mark.long
def test_a_module_is_run_with_m(shoal_run: Run, tmp_path: Path) -> None:
    """`-m module args` runs the module, found from the working directory as with python -m."""
    (tmp_path / "trainer.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, output = finish(shoal_run(None, "-n", "1", "-m", "trainer", "-n", "7"))
    assert code == 0, output
    assert "__main__ ['-n', '7']" in output


@pytest.mark.long
def test_a_killed_worker_is_started_again(shoal_run: Run, book: ExitBook, tmp_path: Path) -> None:
    """SIGKILL is reported as the exit code, the same member id is started again, and the job
    completes."""
    os.mkfifo(tmp_path / "again")
    script = f"""
import os, pathlib, signal
# Slot 0 reads from the pipe until the second life of slot 1, so that the job is not over before.
first, again = (pathlib.Path({str(tmp_path)!r}) / name for name in ("first", "again"))
if os.environ["SHOAL_MEMBER_ID"].endswith("-0"):
    again.read_text()
elif not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGKILL)
else:
    again.write_text("here")
print("done")
"""
    code, output = finish(shoal_run(script, "-n", "2", "--job", "j", "--max-restarts", "1"))
    assert code == 0, output
    assert "was killed by SIGKILL" in output
    reports = [book.reports.get(timeout=DEADLINE_S) for _ in range(book.reports.qsize())]
    killed = [report for report in reports if report.exit_code == -signal.SIGKILL]
    assert len(killed) == 1
    assert killed[0].member_id.endswith("-1")
    assert (killed[0].job, killed[0].host) == ("j", socket.gethostname())


@pytest.mark.long
def test_restarts_are_bounded(shoal_run: Run, book: ExitBook) -> None:
    """A worker that is killed each time runs 1 + max-restarts times; the code is 128 + signal."""
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, output = finish(shoal_run(script, "-n", "1", "--max-restarts", "2"))
    assert code == 128 + signal.SIGKILL, output
    reports = [book.reports.get(timeout=DEADLINE_S) for _ in range(3)]
    assert len({report.member_id for report in reports}) == 1
    assert len({report.pid for report in reports}) == 3


def refuse_spawns(monkeypatch: pytest.MonkeyPatch, *refused: int) -> None:
    """Have the kernel refuse these of the launcher's processes, counted from 1."""
    numbers, spawn = itertools.count(1), Supervisor.spawn

    def refusing(supervisor: Supervisor, command: ChildCommand) -> Process:
        if next(numbers) in refused:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return spawn(supervisor, command)

    monkeypatch.setattr(Supervisor, "spawn", refusing)


def launcher_here(tmp_path: Path, coordinator: str, script: str, num_workers: int) -> Launcher:
    """A launcher of this process, of workers w-0, w-1, ..."""
    path = tmp_path / "script.py"
    path.write_text(script)
    config = RunConfig(
        script=[str(path)],
        job="j",
        num_workers=num_workers,
        coordinators=(coordinator,),
        environment={**os.environ, "SHOAL_MEMBER_ID": "w"},
    )
    return Launcher(config, StopOrders())


def test_a_restart_that_the_kernel_refuses_is_tried_again(
    coordinator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The other worker goes on meanwhile, and ends once the first has been started again."""
    monkeypatch.setattr(worker_slots, "PASSING_PAUSE_S", 0.05)
    refuse_spawns(monkeypatch, 3)
    os.mkfifo(tmp_path / "again")
    script = f"""
import os, pathlib, signal
first, again = (pathlib.Path({str(tmp_path)!r}) / name for name in ("first", "again"))
if os.environ["SHOAL_MEMBER_ID"] == "w-1":
    again.read_text()
elif not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGKILL)
else:
    again.write_text("here")
"""
    code = launcher_here(tmp_path, coordinator, script, 2).run()
    said = capfd.readouterr().err
    assert code == 0, said
    reason = os.strerror(errno.EAGAIN)
    assert f"w-0 could not be started ({reason}); started again in 0.05 s (restart 2 of 3)" in said


def test_refused_restarts_are_bounded(
    coordinator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(worker_slots, "PASSING_PAUSE_S", 0.01)
    refuse_spawns(monkeypatch, 2, 3, 4)
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code = launcher_here(tmp_path, coordinator, script, 1).run()
    assert code == os.EX_TEMPFAIL
    assert capfd.readouterr().err.count("w could not be started") == 3


def test_a_worker_trains_on_while_the_reader_of_stdout_pauses(
    coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's lines wait for the reader, as does the end of the run."""
    texts, trained = [f"{number:01000}" for number in range(1000)], tmp_path / "trained"
    script = f"""
import pathlib
for number in range(1000):
    print(f"{{number:01000}}")
pathlib.Path({str(trained)!r}).touch()
"""
    reading, writing = os.pipe()

    def read() -> tuple[bool, list[str]]:
        give_up_s = time.monotonic() + DEADLINE_S
        while not trained.exists() and time.monotonic() < give_up_s:
            time.sleep(0.01)
        has_trained = trained.exists()
        with open(reading) as shown:  # noqa: PTH123 - a descriptor
            return has_trained, re.findall(r"^\[w\] (.*)$", shown.read(), re.MULTILINE)

    with futures.ThreadPoolExecutor(1) as reader:
        found = reader.submit(read)
        with open(writing, "w") as stdout:  # noqa: PTH123
            monkeypatch.setattr(sys, "stdout", stdout)
            assert launcher_here(tmp_path, coordinator, script, 1).run() == 0
        assert found.result(DEADLINE_S) == (True, texts)


def test_a_launcher_removes_old_logs_of_earlier_ones(
    coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = WorkerLog(log_path(log_root({}), "j", "gone"))
    gone.write("line")
    gone.close()
    os.utime(gone.path, (1, 1))
    assert launcher_here(tmp_path, coordinator, "print('line')", 1).run() == 0
    assert [path.name for path in gone.path.parent.iterdir()] == ["w.log"]


def test_a_run_whose_workers_the_kernel_refuses_does_not_begin(
    coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the limits. The worker that was started is ended."""
    refuse_spawns(monkeypatch, 2)
    launcher = launcher_here(tmp_path, coordinator, "import signal; signal.pause()", 2)
    with pytest.raises(Unavailable, match=r"w-1 cannot be started; saw Resource .*ulimit -u"):
        launcher.run()
    assert launcher.slots[0].process is not None
    assert launcher.slots[0].process.exit_code == -signal.SIGTERM


@pytest.mark.long
def test_the_output_of_a_restarted_worker_needs_no_further_open_file(shoal_run: Run) -> None:
    """Each process of the worker counts the files with its output that its launcher has open."""
    script = (
        "import os, pathlib, signal\n"
        "files = pathlib.Path(f'/proc/{os.getppid()}/fd').iterdir()\n"
        "print('open:', sum('-0.log' in str(each.readlink()) for each in files), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    code, output = finish(shoal_run(script, "-n", "1", "--max-restarts", "3"))
    assert code == 128 + signal.SIGKILL, output
    assert re.findall("open: ([0-9]+)", output) == ["0", "1", "1", "1"]


@pytest.mark.sampled()
@pytest.mark.parametrize(("restart_on", "runs"), [("signal", 1), ("failure", 3)])
def test_a_failed_worker_is_started_again_only_on_request(
    shoal_run: Run, restart_on: str, runs: int
) -> None:
    """A non-zero exit becomes the run's code. With --restart-on failure the worker is tried
    again."""
    script = "import sys; print('tried'); sys.exit(5)"
    code, output = finish(
        shoal_run(script, "--max-restarts", "2", "--restart-on", restart_on, "-n", "1")
    )
    assert code == 5, output
    assert output.count("tried") == runs


@pytest.mark.long
def test_no_worker_is_started_again_for_a_job_whose_state_is_lost(
    shoal_run: Run, book: ExitBook
) -> None:
    """A new worker would only get the same error. The reason is the last line, and the run has
    failed."""
    book.lost = StateLost("the state of job j is lost", seen="nobody", fix="Run it with --fresh.")
    book.phase = "lost"
    script = "import sys; print('tried'); sys.exit(1)"
    code, output = finish(shoal_run(script, "-n", "2", "--restart-on", "failure"))
    assert code == 1, output
    assert output.count("tried") == 2
    assert output.splitlines()[-1] == f"shoal run: {book.lost}"


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("phase", ["lost", "stopped", "failed"])
def test_a_worker_that_was_killed_is_not_started_again_for_a_job_that_is_over(
    shoal_run: Run, book: ExitBook, phase: str
) -> None:
    """The answer to the report of the killed worker has the job's phase."""
    book.phase = phase
    script = "import os, signal; print('tried', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    code, output = finish(shoal_run(script, "-n", "1", "--job", "j"))
    assert code == 128 + signal.SIGKILL, output
    assert output.count("tried") == 1
    assert f"-0 was killed by SIGKILL; job j is {phase}\n" in output
    assert "started again" not in output


@pytest.mark.long
def test_an_error_in_one_worker_is_the_runs_code(shoal_run: Run) -> None:
    """Other workers that complete do not hide a worker that failed by itself."""
    script = "import os, sys; sys.exit(4 if os.environ['SHOAL_MEMBER_ID'].endswith('-0') else 0)"
    code, output = finish(shoal_run(script, "-n", "2"))
    assert code == 4, output


@pytest.mark.long
def test_a_script_for_torchrun_gets_a_hint(shoal_run: Run) -> None:
    """torch says only that RANK is not set. The hint comes once, not for each worker."""
    script = "import torch; torch.distributed.init_process_group('gloo')"
    code, output = finish(shoal_run(script, "-n", "2"))
    assert code == 1
    assert output.count("torchrun --rdzv-backend=shoal") == 1, output


@pytest.mark.long
def test_ctrl_c_prints_no_traceback(shoal_run: Run) -> None:
    """Workers are asked to end as by SIGTERM, wherever their scripts are."""
    process = shoal_run("print('here', flush=True); import time; time.sleep(60)", "-n", "2")
    first = "".join(read_until(process, "here", count=2))
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "2 workers have started; they join the job after importing torch" in first + output
    assert "Traceback" not in output and "KeyboardInterrupt" not in output


@pytest.mark.sampled()
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(shoal_run: Run, number: signal.Signals) -> None:
    """SIGINT and SIGTERM end every worker, no worker is started again, and the code names the
    signal."""
    process = shoal_run(WAIT, "-n", "2")
    lines = read_until(process, " pid ", count=2)
    process.send_signal(number)
    code, output = finish(process)
    assert code == 128 + number, output
    assert "started again" not in output
    pids = [int(line.rpartition(" ")[2]) for line in lines if " pid " in line]
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.long
def test_halts_are_reported_in_order(shoal_run: Run, book: ExitBook) -> None:
    """The coordinator gets a report of each of SIGSTOP, SIGCONT, SIGSTOP and SIGKILL, in this
    order."""
    process = shoal_run(WAIT, "-n", "1", "--max-restarts", "0")
    pid = int(read_until(process, " pid ")[-1].rpartition(" ")[2])
    steps = (
        (signal.SIGSTOP, "halted"),
        (signal.SIGCONT, "goes on"),
        (signal.SIGSTOP, "halted"),
        (signal.SIGKILL, "-9"),
    )
    for number, step in steps:
        os.kill(pid, number)
        assert book.events.get(timeout=DEADLINE_S) == f"{pid} {step}"
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output


@pytest.mark.long
def test_a_halt_is_reported_while_the_report_of_an_exit_is_unanswered(
    shoal_run: Run, book: ExitBook
) -> None:
    """An answer to an exit may wait for etcd for longer than a process may be halted."""
    process = shoal_run(WAIT, "-n", "2", "--max-restarts", "0")
    lines = [line for line in read_until(process, " pid ", count=2) if " pid " in line]
    ended, halted = (int(line.rpartition(" ")[2]) for line in lines)
    book.exits_answered.clear()
    os.kill(ended, signal.SIGKILL)
    assert book.events.get(timeout=DEADLINE_S) == f"{ended} -9"
    for number, step in ((signal.SIGSTOP, "halted"), (signal.SIGCONT, "goes on")):
        os.kill(halted, number)
        assert book.events.get(timeout=DEADLINE_S) == f"{halted} {step}"
    book.exits_answered.set()
    process.send_signal(signal.SIGTERM)
    finish(process)


CLAIM = """
import os
from shoal_client.liveness.beat_board import BeatSlot
from shoal_proto.v1.identity_pb2 import Token
slot = BeatSlot.open(os.environ["SHOAL_BEATS"])
token = Token(job="j", member_id=os.environ["SHOAL_MEMBER_ID"], incarnation="i")
slot.progress(7)
slot.claim(token, heartbeat_s=0.05, patience_s=60.0)
"""


@pytest.mark.long
def test_one_call_sends_the_heartbeats_of_all_running_workers(
    shoal_run: Run, book: ExitBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeat calls cover every worker, with its steps, except halted and ended workers."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")

    def await_beats(*members: str) -> None:
        while book.beats.get(timeout=DEADLINE_S) != dict.fromkeys(members, 7):
            pass

    book.members = ("w-0", "w-1", "w-2")  # so that a halted worker is not lost
    process = shoal_run(CLAIM + WAIT, "-n", "3", "--max-restarts", "0")
    lines = [line for line in read_until(process, " pid ", count=3) if " pid " in line]
    pids = {line[1:4]: int(line.rpartition(" ")[2]) for line in lines}
    await_beats("w-0", "w-1", "w-2")
    os.kill(pids["w-0"], signal.SIGSTOP)
    await_beats("w-1", "w-2")
    os.kill(pids["w-1"], signal.SIGKILL)
    await_beats("w-2")
    os.kill(pids["w-0"], signal.SIGCONT)
    await_beats("w-0", "w-2")
    process.send_signal(signal.SIGTERM)
    finish(process)


LIVES = """
import os, pathlib, sys, time
from shoal_client.liveness.beat_board import BeatSlot, MembershipEnding
from shoal_proto.v1.identity_pb2 import Token
life = pathlib.Path("life")
life.write_text(life.read_text() + "x" if life.exists() else "x")
number = len(life.read_text())
print("life", number, flush=True)
slot = BeatSlot.open(os.environ["SHOAL_BEATS"])
assert slot.ending is MembershipEnding.UNKNOWN  # the ending of one process is not the next one's
token = Token(job="j", member_id=os.environ["SHOAL_MEMBER_ID"], incarnation=f"life-{number}")
slot.claim(token, heartbeat_s=0.05, patience_s=60.0)
if number <= int(sys.argv[1]):
    while slot.ending is MembershipEnding.UNKNOWN:
        time.sleep(0.01)
    sys.exit("some error that followed from it")
"""


@pytest.mark.long
def test_a_fenced_worker_is_started_again(shoal_run: Run, book: ExitBook) -> None:
    """The script's own error alone would start nothing again under `--restart-on signal`."""
    book.refused = {f"life-{number}": Fenced("no member any more") for number in (1, 2)}
    code, output = finish(shoal_run(LIVES, "-n", "1", arguments=("2",)))
    assert code == 0, output
    assert "was fenced (exit code 1); started again in 0.5 s (restart 1 of 3)" in output
    assert "was fenced (exit code 1); started again in 1 s (restart 2 of 3)" in output
    assert "1 of 1 workers completed" in output


@pytest.mark.long
def test_restarts_of_a_fenced_worker_are_bounded(shoal_run: Run, book: ExitBook) -> None:
    """A fenced worker is started again as often as any other."""
    book.refused = {f"life-{number}": Fenced("no member any more") for number in (1, 2)}
    code, output = finish(shoal_run(LIVES, "--max-restarts", "1", arguments=("2",)))
    assert code == 1, output
    assert "life 2" in output
    assert "life 3" not in output


@pytest.mark.long
def test_an_interrupt_before_the_restart_of_a_fenced_worker_ends_the_launcher(
    shoal_run: Run, book: ExitBook
) -> None:
    """The launcher ends at once: no worker runs, and none is started."""
    book.refused = {"life-1": Fenced("no member any more")}
    process = shoal_run(LIVES, "-n", "1", arguments=("1",))
    read_until(process, "started again in")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert "life 2" not in output


@pytest.mark.long
def test_a_run_succeeds_if_the_job_was_completed_without_its_fenced_worker(
    shoal_run: Run, book: ExitBook
) -> None:
    """The worker that is started again finds nothing left to do: the run's code is 0."""
    book.refused = {"life-1": Fenced("no member any more"), "life-2": JobFinished("it is over")}
    code, output = finish(shoal_run(LIVES, "-n", "1", arguments=("2",)))
    assert code == 0, output
    assert "life 3" not in output


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProposalConflict("members differ"), False),
        (InvalidSpec("bad bounds"), False),
        (StateLost("nobody holds it"), False),
        (JobFinished("it is over"), False),
        (MemberDrained("it was asked to leave"), False),
        (Fenced("replaced", details={"replaced_by": "another process"}), False),
        (PeersUnreachable("a firewall"), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ShoalError) else "",
)
def test_a_worker_with_a_final_refusal_is_not_started_again(
    shoal_run: Run, book: ExitBook, error: ShoalError, again: bool
) -> None:
    """Final refusals are not tried again even with --restart-on failure; temporary ones are."""
    book.refused = {"life-1": error}
    script = LIVES.replace("while slot.ending is MembershipEnding.UNKNOWN", "while not refused()")
    script = script.replace("number = len", "began_s = time.monotonic()\nnumber = len")
    # A temporary refusal leaves no trace on the board: a few heartbeats are enough.
    held = "slot.ending is not MembershipEnding.UNKNOWN or time.monotonic() > began_s + 0.5"
    script = script.replace("slot = BeatSlot", f"refused = lambda: {held}\nslot = BeatSlot")
    code, output = finish(
        shoal_run(script, "--restart-on", "failure", "--max-restarts", "1", arguments=("1",))
    )
    assert ("life 2" in output) == again, output
    # A job that others have finished is not a failure of a standby.
    is_done = again or isinstance(error, JobFinished)
    assert code == (0 if is_done else 1), output
    assert ("was not needed: the job was finished without it" in output) == (is_done and not again)


@pytest.mark.sampled()
@pytest.mark.parametrize("restart_on", ["signal", "failure"])
def test_a_drained_worker_is_no_failure(shoal_run: Run, restart_on: str) -> None:
    """A worker with exit code 143 is not started again, and the run succeeds if the other completes
    the job."""
    script = "import os, sys; sys.exit(143 if os.environ['SHOAL_MEMBER_ID'].endswith('-0') else 0)"
    code, output = finish(shoal_run(script, "-n", "2", "--restart-on", restart_on))
    assert code == 0, output
    assert "-0 was drained (exit code 143)" in output
    assert "started again" not in output
    assert "1 of 2 workers completed, drained: " in output


@pytest.mark.long
def test_a_worker_that_ends_before_the_last_batch_has_not_completed_the_job(
    shoal_run: Run, book: ExitBook
) -> None:
    """A script ended early. A worker killed after that is still needed, and the last line says that
    the job is not finished."""
    script = """if 1:
        import os, pathlib, signal
        first = pathlib.Path("first")
        if os.environ["SHOAL_MEMBER_ID"].endswith("-1") and not first.exists():
            first.touch()
            print("pid", os.getpid(), flush=True)
            signal.pause()
    """
    book.goes_on = True
    process = shoal_run(script, "-n", "2", "--job", "j")
    pid = int(read_until(process, "pid ")[-1].split()[-1])
    assert book.events.get(timeout=DEADLINE_S).endswith(" 0")
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert "-1 was killed by SIGKILL; started again" in output
    assert "2 of 2 workers ended before the last batch (job j is not finished)" in output


@pytest.mark.long
def test_a_worker_that_ended_early_has_not_completed_a_job_that_is_lost(
    shoal_run: Run, book: ExitBook
) -> None:
    """The run has the exit code of the worker that was killed after that."""
    script = """if 1:
        import os, signal
        if os.environ["SHOAL_MEMBER_ID"].endswith("-1"):
            print("pid", os.getpid(), flush=True)
            signal.pause()
    """
    book.goes_on = True
    process = shoal_run(script, "-n", "2", "--job", "j")
    pid = int(read_until(process, "pid ")[-1].split()[-1])
    assert book.events.get(timeout=DEADLINE_S).endswith(" 0")
    book.phase = "lost"
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output
    assert "-1 was killed by SIGKILL; job j is lost\n" in output
    assert "(job j is not finished)" in output


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(("other", "expected"), [(143, 143), (5, 5)])
def test_a_run_of_drained_workers_has_exit_code_143_unless_one_failed(
    shoal_run: Run, other: int, expected: int
) -> None:
    """The run's code is 143 if all workers are drained; if one failed, it is that worker's code."""
    script = "import os, sys; sys.exit(143 if os.environ['SHOAL_MEMBER_ID'].endswith('-0') else "
    code, output = finish(shoal_run(f"{script}{other})", "-n", "2"))
    assert code == expected, output


JOINS = """
import os, pathlib, signal, sys, time
from shoal_client.liveness.beat_board import BeatSlot
from shoal_proto.v1.identity_pb2 import Token
member, job = os.environ["SHOAL_MEMBER_ID"], "j"
def joins():
    slot = BeatSlot.open(os.environ["SHOAL_BEATS"])
    token = Token(job=job, member_id=member, incarnation=str(os.getpid()))
    slot.claim(token, heartbeat_s=0.05, patience_s=60.0)
    return slot
def show(text):
    print(text, os.getpid(), flush=True)
def lend_lifeline():
    # The kernel frees the lifeline of a process that is only traced: another holds it instead.
    life, worker, (reads, writes) = joins().lifeline, os.getpid(), os.pipe()
    if os.fork() == 0:
        os.setsid()
        life.hold()
        life._holder = worker
        show("lends")
        os.write(writes, b"!")
        signal.pause()
    os.read(reads, 1)
def deaf():
    signal.signal(signal.SIGTERM, lambda *_: None)
    show("deaf")
    while True:
        signal.pause()
"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", (137, "killed by SIGKILL")),
        ("sys.exit(3)", (3, "failed with exit code 3")),
    ],
    ids=["killed", "failed"],
)
@pytest.mark.parametrize("others", [0, 1])
def test_a_worker_that_fails_after_its_job_was_completed_fails_the_run(
    shoal_run: Run, end: str, expected: tuple[int, str], others: int
) -> None:
    """An evaluation that was killed has no result: a new process would find a finished job."""
    ends = "from shoal_client.liveness.beat_board import MembershipEnding\n"
    ends += "slot = joins(); slot.withdraw(); slot.end(MembershipEnding.COMPLETED)\n"
    script = JOINS + ends + f"member.endswith('-1') and sys.exit()\n{end}"
    options = ("--restart-on", "failure", "--job", "j")
    code, output = finish(shoal_run(script, "-n", str(1 + others), *options))
    status, how = expected
    assert code == status, output
    assert f"{how} after its job was completed" in output
    assert "started again" not in output


def test_a_worker_that_is_refused_by_a_stopped_job_has_not_failed(
    shoal_run: Run, book: ExitBook
) -> None:
    """A replacement reached the job after `shoal stop`."""
    book.phase, book.goes_on = "stopped", True
    ends = "from shoal_client.liveness.beat_board import MembershipEnding\n"
    ends += "late = member.endswith('-1')\n"
    ends += "slot = joins(); slot.withdraw()\n"
    ends += "slot.end(MembershipEnding.REFUSED if late else MembershipEnding.DRAINED)\n"
    ends += "sys.exit(1 if late else 143)"
    code, output = finish(shoal_run(JOINS + ends, "-n", "2", "--job", "j"))
    assert code == 143, output


def test_a_worker_that_was_asked_to_leave_and_failed_is_not_started_again(shoal_run: Run) -> None:
    """The worker's error does not fail a job that the others complete."""
    ends = "from shoal_client.liveness.beat_board import MembershipEnding\n"
    ends += "member.endswith('-1') and sys.exit()\n"
    ends += "slot = joins(); slot.withdraw(); slot.end(MembershipEnding.DRAINED); sys.exit(1)"
    code, output = finish(
        shoal_run(JOINS + ends, "-n", "2", "--restart-on", "failure", "--job", "j")
    )
    assert code == 0, output
    assert "started again" not in output


def test_a_signal_that_ends_an_evaluation_is_the_runs_code(shoal_run: Run) -> None:
    """The other worker has completed the script."""
    ends = "from shoal_client.liveness.beat_board import MembershipEnding\n"
    ends += "slot = joins(); slot.withdraw(); slot.end(MembershipEnding.COMPLETED)\n"
    ends += "member.endswith('-1') and sys.exit()\nshow('evaluates'); signal.pause()"
    process = shoal_run(JOINS + ends, "-n", "2", "--job", "j")
    shown = read_until(process, "evaluates")
    if not any("-1 completed" in line for line in shown):
        read_until(process, "-1 completed")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 128 + signal.SIGINT, output


@pytest.mark.long
def test_a_halted_worker_that_is_lost_is_replaced(shoal_run: Run, book: ExitBook) -> None:
    """Waiting for a SIGCONT is useless: the worker would be fenced."""
    script = JOINS + "joins(); show('up'); pathlib.Path('again').exists() and sys.exit()\n"
    script += "pathlib.Path('again').touch(); signal.pause()"
    process = shoal_run(script, "-n", "1", "--job", "j")
    pid = int(read_until(process, "up ")[-1].split()[-1])
    os.kill(pid, signal.SIGSTOP)
    code, output = finish(process)
    assert code == 0, output
    assert "was declared lost while it was halted" in output
    assert "was killed by SIGKILL; started again (restart 1 of 3)" in output


@pytest.mark.long
def test_a_lost_worker_that_does_not_end_is_replaced(shoal_run: Run, book: ExitBook) -> None:
    """The worker ignores SIGTERM while the job trains: it is killed after the grace time."""
    book.refused = {"first": Fenced("no member any more")}
    script = JOINS.replace("str(os.getpid())", "'again' if os.path.exists('again') else 'first'")
    script += "joins(); os.path.exists('again') and sys.exit()\n"
    script += "pathlib.Path('again').touch(); deaf()"
    code, output = finish(shoal_run(script, "-n", "1", "--job", "j", "--grace-s", "0.5"))
    assert code == 0, output
    assert "was declared lost and does not end" in output
    assert "was killed by SIGKILL; started again (restart 1 of 3)" in output


@pytest.mark.long
def test_a_halted_worker_that_is_not_lost_is_left_alone(shoal_run: Run, book: ExitBook) -> None:
    """A short stop has no effect."""
    book.members = ("w",)
    script = JOINS + "slot = joins(); show('up'); signal.sigwait({signal.SIGUSR1}); slot.withdraw()"
    script = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + script
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_MEMBER_ID", "w")
        process = shoal_run(script, "-n", "1", "--job", "j")
    pid = int(read_until(process, "up ")[-1].split()[-1])
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3):
        assert book.asked.get(timeout=DEADLINE_S) == "j"
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGUSR1)
    code, output = finish(process)
    assert code == 0, output
    assert "SIGKILL" not in output


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    "stuck",
    ["show('up'); signal.pause()", "slot = joins(); deaf()", "deaf()"],
    ids=["halted", "as-a-member", "before-it-joins"],
)
def test_a_launcher_ends_with_its_finished_job(
    shoal_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stuck: str
) -> None:
    """A worker that does not end within the grace time is killed, however it is stuck."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")
    script = JOINS + f"if member == 'w-1':\n    {stuck}\n"
    script += "while not os.path.exists('go'): time.sleep(0.01)"
    process = shoal_run(script, "-n", "2", "--job", "j", "--grace-s", "0.5")
    shown = read_until(process, "up " if "up" in stuck else "deaf ")[-1]
    if "up" in stuck:
        os.kill(int(shown.split()[-1]), signal.SIGSTOP)
    (tmp_path / "go").touch()
    code, output = finish(process)
    assert code == 0, output
    assert "job j is finished, and w-1 did not end" in output
    assert "w-1 was killed by SIGKILL" in output


@pytest.mark.long
def test_a_script_that_has_left_its_finished_job_goes_on(
    shoal_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script may save or evaluate for any time; so may a script that is in its next job, and
    one that trained in a child process."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")
    script = (
        JOINS
        + """
job = "another" if member == "w-2" else "j"
if member == "w-3":
    if child := os.fork():
        os.waitpid(child, 0)
        time.sleep(2.0)
        show("saved")
    else:
        joins().withdraw()
elif member != "w-0":
    slot = joins()
    if member == "w-1":
        slot.withdraw()
    time.sleep(2.0)
    show("saved")
    slot.withdraw()
"""
    )
    code, output = finish(shoal_run(script, "-n", "4", "--job", "j", "--grace-s", "0.3"))
    assert code == 0, output
    assert output.count("saved") == 3, output
    assert "SIGKILL" not in output


@pytest.mark.sampled()
@pytest.mark.parametrize("phase", ["lost", "stopped", "failed"])
def test_a_launcher_ends_with_a_job_that_others_ended(
    shoal_run: Run, book: ExitBook, phase: str
) -> None:
    """The only worker hangs and no longer learns of the job's end; the launcher asks a
    coordinator."""
    book.phase, book.refused = phase, {"w": Fenced("no member any more")}
    script = JOINS.replace("str(os.getpid())", "'w'") + "slot = joins(); deaf()"
    code, output = finish(shoal_run(script, "-n", "1", "--job", "j", "--grace-s", "0.5"))
    assert code == 128 + signal.SIGKILL, output
    assert f"job j is {phase}, and" in output
    assert "started again" not in output


@pytest.mark.long
def test_a_worker_that_starts_is_ended_with_its_stopped_job(
    shoal_run: Run, book: ExitBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would join the job once an operator retries it; the launcher does not wait for
    the grace time."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")
    book.phase = "stopped"
    script = "import os, sys\nif os.environ['SHOAL_MEMBER_ID'] == 'w-0':\n    sys.exit(143)\n"
    code, output = finish(shoal_run(script + WAIT, "-n", "2", "--job", "j", "--grace-s", "600"))
    assert code == 143, output
    assert "job j is stopped: ending w-1, which starts" in output
    assert "w-1 was killed by SIGTERM; job j is stopped" in output


@pytest.mark.long
def test_a_launcher_ends_though_a_worker_hangs_in_the_kernel(
    shoal_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does not end the worker, which keeps its lifeline; the launcher ends all the same,
    and names the process."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")
    any_tracer = "import ctypes; ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1))\n"
    process = shoal_run(
        any_tracer + JOINS + "lend_lifeline()\ndeaf()", "-n", "1", "--grace-s", "0.5"
    )
    lender = int(read_until(process, "lends ")[-1].split()[-1])
    pid = int(read_until(process, "deaf ")[-1].split()[-1])
    # The launcher sees the end of a traced process only once its tracer has seen it.
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    try:
        process.send_signal(signal.SIGTERM)
        code, output = finish(process)
    finally:
        os.waitpid(pid, 0)
        os.kill(lender, signal.SIGKILL)
    assert code == 128 + signal.SIGTERM, output
    assert f"w (pid {pid}) hangs in the kernel and does not end on SIGKILL" in output


def test_workers_may_drain(shoal_run: Run) -> None:
    """Workers finish in their own time after a SIGTERM, and are not killed."""
    script = """
import signal, sys
def drain(number, frame):
    print("hands over", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, drain)
"""
    process = shoal_run(script + WAIT, "-n", "2")
    read_until(process, " pid ", count=2)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert output.count("hands over") == 2
    assert output.count("was drained") == 2


@pytest.mark.long
def test_workers_that_have_not_joined_are_no_workers_that_finish_a_step(
    shoal_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line after a signal counts both kinds of workers."""
    monkeypatch.setenv("SHOAL_MEMBER_ID", "w")
    claim = "\n".join(f"    {line}" for line in CLAIM.strip().splitlines())
    script = f"import os\nif os.environ['SHOAL_MEMBER_ID'] != 'w-2':\n{claim}\n"
    process = shoal_run(script + WAIT, "-n", "3", "--job", "j")
    read_until(process, " pid ", count=3)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    expected = "2 workers finish their step and end, 1 worker ends before it has joined"
    assert f"SIGTERM: {expected}; a second signal kills them" in output


def test_the_grace_time_is_bounded(shoal_run: Run) -> None:
    """A worker that does not end after SIGTERM is killed once --grace-s is over."""
    deaf = "import signal; signal.signal(15, lambda *_: print('deaf', flush=True)); "
    process = shoal_run(deaf + WAIT + "\nwhile True: signal.pause()", "-n", "1", "--grace-s", "0.2")
    read_until(process, " pid ")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert "was killed by SIGKILL" in output


def test_a_signal_to_the_process_and_its_group_counts_once(shoal_run: Run, tmp_path: Path) -> None:
    """`timeout` sends both: workers hand over all the same."""
    script = f"""
import pathlib, signal, sys, time
def drain(number, frame):
    while not pathlib.Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    print("hands over", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, drain)
"""
    process = shoal_run(script + WAIT, "-n", "1")
    read_until(process, " pid ")
    process.send_signal(signal.SIGTERM)
    read_until(process, "SIGTERM: 1 worker ends before it has joined")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert "hands over" in output
    assert "SIGKILL" not in output


def test_a_second_interrupt_kills(shoal_run: Run) -> None:
    """Workers that do not end on the first Ctrl-C are killed by the second one."""
    deaf = "import signal; signal.signal(15, lambda *_: print('deaf', flush=True)); "
    process = shoal_run(deaf + WAIT + "\nwhile True: signal.pause()", "-n", "1")
    read_until(process, " pid ")
    process.send_signal(signal.SIGINT)
    read_until(process, "deaf")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "SIGKILL" in output


@pytest.mark.parametrize("first", ["signal", "output"])
def test_ctrl_c_of_a_pipeline_kills_no_worker(shoal_run: Run, tmp_path: Path, first: str) -> None:
    """`shoal run ... | tee log`: Ctrl-C reaches both. That tee is gone is not a second signal."""
    drained = tmp_path / "drained"
    script = f"""
import os, pathlib, signal, sys, time
def drain(number, frame):
    if {first == "output"}:
        os.kill(os.getppid(), signal.SIGINT)
    print("finishes its step", flush=True)
    time.sleep(0.3)
    pathlib.Path({str(drained)!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, drain)
signal.signal(signal.SIGUSR1, lambda *_: print("trains", flush=True))
"""
    process = shoal_run(script + WAIT + "\nsignal.pause()", "-n", "1")
    pid = int(read_until(process, " pid ")[-1].split()[-1])
    assert process.stdout is not None
    process.stdout.close()
    if first == "signal":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(pid, signal.SIGUSR1)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGINT
    assert drained.exists()


def test_a_full_disk_ends_no_run(coordinator: str, tmp_path: Path) -> None:
    """`shoal run ... > log 2>&1` trains on, and has the exit code of its workers."""
    (tmp_path / "train.py").write_text("print('first')\nprint('second')\n")
    command = [sys.executable, "-m", "shoal_client", "run", "--coordinator", coordinator]
    with Path("/dev/full").open("w") as full:
        code = subprocess.run(
            [*command, str(tmp_path / "train.py")],
            stdout=full,
            stderr=full,
            timeout=DEADLINE_S,
            check=False,
        ).returncode
    assert code == 0


def test_a_killed_launcher_leaves_no_worker(shoal_run: Run) -> None:
    process = shoal_run(WAIT, "-n", "2")
    lines = read_until(process, " pid ", count=2)
    pids = [int(line.rpartition(" ")[2]) for line in lines if " pid " in line]
    process.kill()
    process.wait(DEADLINE_S)
    deadline_s = time.monotonic() + DEADLINE_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a worker outlived its launcher"
        time.sleep(0.01)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-n", "0"), "at least 1"),
        (("-n", "1", "--min", "3", "--max", "2"), "--min is above --max; saw 3 > 2"),
        (("-n", "1", "--min", "2", "--desired", "1"), "--desired is out of bounds; saw 1"),
        (("-n", "1", "--coordinator", "nowhere"), "bad coordinator address; saw 'nowhere'"),
        (("--job", "my run"), "the job has a bad name; saw 'my run'; expected 1 to 128 letters"),
        (("-n", "1", "--max-restarts", "-1"), "bad --max-restarts"),
        (("-n", "1", "--grace-s", "0"), "bad --grace-s; saw 0; expected above 0"),
        (("-n", "many"), "bad -n; saw 'many'; expected a number, auto, gpu or cpu"),
        (("--finished-file", "/no/dir/f"), "bad --finished-file; saw /no/dir/f; expected a file"),
        (("--nnodes", "2"), "starts the workers of one host; saw --nnodes 2 without --hosts"),
        (("--workers", "3"), "Unknown option: --workers. --help shows the options."),
    ],
)
def test_bad_options_are_refused_in_one_line(
    shoal_run: Run, options: tuple[str, ...], words: str
) -> None:
    """The error is one line that names what was seen and what is expected. The exit code is 2, and
    nothing is started."""
    code, output = finish(shoal_run("print('ran')", *options))
    assert code == 2
    assert words in output
    assert len(output.splitlines()) == 1


def test_torchruns_options_for_the_number_of_workers_are_accepted(shoal_run: Run) -> None:
    """A script that does not use Shoal also gets a note that its processes trained by
    themselves."""
    code, output = finish(shoal_run("print('ran')", "--nnodes", "1", "--nproc-per-node", "2"))
    assert code == 0, output
    assert output.count("] ran") == 2
    assert "the script never calls shoal.join(), and ran 2 times, each time by itself" in output


def test_workers_that_do_not_join_are_warned_of_while_they_run(
    coordinator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The warning comes once, with what to do."""
    monkeypatch.setattr("shoal.launcher.launcher.NOT_JOINED_S", 0.2)
    script = "import time; time.sleep(3)"
    assert launcher_here(tmp_path, coordinator, script, 2).run() == 0
    said = capfd.readouterr().err
    warning = "warning: none of this launcher's workers has joined job j after 0.2 s. If the script"
    assert said.count(warning) == 1
    assert said.index(warning) < said.index("completed")


def test_options_may_be_written_with_underscores() -> None:
    """Options of torchrun work so, too. The value may be a word of its own."""
    words = ["run", "--nproc_per_node", "3", "--max_restarts=5", "train.py", "--lr_max", "1"]
    config = read_config(words, installed_commands())
    assert config.num_workers == 3 and config.restart.max_restarts == 5
    assert list(config.script) == ["train.py", "--lr_max", "1"]


def test_a_host_gets_as_many_workers_as_it_has_cores_or_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["run", "-n", "auto", "train.py"]
    cores = len(os.sched_getaffinity(0))
    assert read_config(arguments, installed_commands()).num_workers == cores
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert read_config(arguments, installed_commands()).num_workers == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f, MIG-2e,-1,0")
    assert read_config(arguments, installed_commands()).num_workers == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert read_config(arguments, installed_commands()).num_workers == cores, "as in Slurm"


def test_a_syntax_error_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error appears once, as Python reports it."""
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    script = tmp_path / "train.py"
    script.write_text("print('ran')\nfor batch in\n")
    command = [sys.executable, "-m", "shoal_client", "run", "-n", "3", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    first, *_, last = done.stderr.splitlines()
    assert first.strip() == f'File "{script}", line 2'
    assert last == "SyntaxError: invalid syntax"
    assert "starting a cluster" not in done.stderr


def test_a_missing_script_is_refused() -> None:
    """The path is named; the exit code is 2."""
    command = [sys.executable, "-m", "shoal_client", "run", "/no/such.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert "no such script; saw /no/such.py" in done.stderr


def test_a_run_waits_for_a_coordinator_up_to_its_limit(
    shoal_run: Run, book: ExitBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher says at once that no coordinator answers, and for how long it waits; later it
    begins."""
    monkeypatch.setenv("SHOAL_ADMISSION_S", "600")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        process = shoal_run("print('ran')", "--coordinator", f"127.0.0.1:{port}")
        text = read_until(process, "Waiting for a coordinator for up to")[-1]
        assert "for up to 600 s (SHOAL_ADMISSION_S)." in text
        assert f"no coordinator answers at 127.0.0.1:{port}" in text
    with serving(book, port):
        code, output = finish(process)
    assert code == 0, output
    assert "a coordinator has answered" in output and "] ran" in output


@pytest.mark.parametrize("given", ["soon", "0", "-1", "1e400", "9" * 5000])
def test_a_bad_time_to_wait_for_a_coordinator_is_refused(given: str) -> None:
    with pytest.raises(InvalidSpec, match=r"bad SHOAL_ADMISSION_S.*1 to 31536000"):
        admission_s(given)


def test_an_unreachable_coordinator_ends_the_run(shoal_run: Run) -> None:
    """The address is named at once, and no worker is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, output = finish(shoal_run("print('ran')", "-n", "1", "--coordinator", address))
    assert code == 1
    assert f"no coordinator answers at {address}" in output
    assert "ran" not in output
