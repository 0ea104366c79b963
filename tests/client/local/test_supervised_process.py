"""Child processes: none outlives its parent, and every end is noticed."""

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.commands import is_alive

from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_proto.errors import InvalidSpec

DEADLINE_S = 20.0
FOREVER = "import signal; print('up', flush=True); signal.pause()"


def python(code: str, name: str = "child", **options: object) -> ChildCommand:
    return ChildCommand(name=name, arguments=(sys.executable, "-u", "-c", code), **options)  # type: ignore[arg-type]


def await_death(pid: int) -> bool:
    """True if a process that is not a child ends before the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def exits() -> queue.SimpleQueue[Process]:
    return queue.SimpleQueue()


@pytest.fixture
def stops() -> queue.SimpleQueue[tuple[Process, bool]]:
    return queue.SimpleQueue()


@pytest.fixture
def supervisor(
    exits: queue.SimpleQueue[Process], stops: queue.SimpleQueue[tuple[Process, bool]]
) -> Iterator[Supervisor]:
    def on_stop(process: Process, halted: bool) -> None:
        stops.put((process, halted))

    with Supervisor(on_exit=exits.put, on_stop=on_stop, grace_s=2.0) as supervisor:
        yield supervisor


def test_lines_and_exit_code_are_reported(
    supervisor: Supervisor, exits: queue.SimpleQueue[Process]
) -> None:
    """Lines of stdout and stderr reach the sink, including a last line without newline."""
    lines: list[str] = []
    code = "import sys; print('a'); print('b', file=sys.stderr); print('c', end=''); sys.exit(7)"
    process = supervisor.spawn(python(code, sink=lines.append))
    assert exits.get(timeout=DEADLINE_S) is process
    process.drain(DEADLINE_S)
    assert (process.exit_code, lines) == (7, ["a", "b", "c"])


def test_an_exit_is_noticed_though_sigchld_was_ignored() -> None:
    """A shell with `trap '' CHLD` starts its commands so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Supervisor(grace_s=0.1) as supervisor:
            assert supervisor.spawn(python("raise SystemExit(7)")).wait(DEADLINE_S) == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_death_by_signal_is_reported_at_once(
    supervisor: Supervisor, exits: queue.SimpleQueue[Process]
) -> None:
    """SIGKILL is reported within a tenth of a second, as the negative signal number."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    process = supervisor.spawn(python(FOREVER, sink=lines.put))
    assert lines.get(timeout=DEADLINE_S) == "up"
    killed_s = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    assert exits.get(timeout=DEADLINE_S) is process
    assert time.monotonic() - killed_s < 0.5  # 0.1 with a margin for a busy machine
    assert process.exit_code == -signal.SIGKILL


def test_a_halted_child_is_reported(
    supervisor: Supervisor, stops: queue.SimpleQueue[tuple[Process, bool]]
) -> None:
    """SIGSTOP and SIGCONT of a child are each reported once, and it can still be stopped."""
    process = supervisor.spawn(python(FOREVER, sink=lambda line: None))
    process.send_signal(signal.SIGSTOP)
    assert stops.get(timeout=DEADLINE_S) == (process, True)
    process.send_signal(signal.SIGCONT)
    assert stops.get(timeout=DEADLINE_S) == (process, False)
    process.send_signal(signal.SIGSTOP)
    assert stops.get(timeout=DEADLINE_S) == (process, True)
    assert process.stop(DEADLINE_S) == -signal.SIGTERM


def test_a_child_that_continues_is_not_reported_as_halted(
    supervisor: Supervisor, stops: queue.SimpleQueue[tuple[Process, bool]]
) -> None:
    """The last report is that the child continues, however soon SIGCONT follows SIGSTOP."""
    process = supervisor.spawn(python(FOREVER, sink=lambda line: None))
    stat = Path(f"/proc/{process.pid}/stat")
    for _ in range(300):
        process.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + DEADLINE_S
        while ") T " not in stat.read_text():
            assert time.monotonic() < deadline_s
        process.send_signal(signal.SIGCONT)
        while stops.get(timeout=DEADLINE_S) != (process, False):
            pass


def test_a_child_is_killed_only_after_the_grace_time(supervisor: Supervisor) -> None:
    """SIGTERM lets a child end by itself; one that ignores it is killed after the grace time."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    graceful = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); "
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); "
    first = supervisor.spawn(python(graceful + FOREVER, sink=lines.put))
    second = supervisor.spawn(python(deaf + FOREVER, sink=lines.put))
    assert [lines.get(timeout=DEADLINE_S) for _ in range(2)] == ["up", "up"]
    assert first.stop(DEADLINE_S) == 3
    assert second.stop(0.2) == -signal.SIGKILL


def test_a_grandchild_ends_with_the_child(supervisor: Supervisor) -> None:
    """The grandchild is in the child's group."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c',"
        f" {FOREVER!r}]); print(p.pid)\nimport signal; signal.pause()"
    )
    process = supervisor.spawn(python(code, sink=lines.put))
    grandchild = next(int(each) for each in iter(lambda: lines.get(timeout=20), "") if each != "up")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert await_death(grandchild)


def test_a_missing_command_has_exit_code_127(supervisor: Supervisor, tmp_path: Path) -> None:
    """The log names the command."""
    log_path = tmp_path / "log"
    process = supervisor.spawn(
        ChildCommand(name="ghost", arguments=("/no/such/command",), log_path=log_path)
    )
    assert process.wait(DEADLINE_S) == 127
    assert "/no/such/command" in log_path.read_text()


def test_a_child_that_no_thread_could_watch_is_refused(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of a process that the kernel refuses, and no child is left."""
    start, popen = threading.Thread.start, subprocess.Popen
    pids: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        made: Any = popen(*arguments, **options)
        pids.append(made.pid)
        return made

    monkeypatch.setattr(subprocess, "Popen", noted)

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("shoal-watch"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(OSError, match="can't start new thread") as refused:
        supervisor.spawn(python(FOREVER, sink=lambda line: None))
    assert refused.value.errno == errno.EAGAIN
    assert supervisor.running == []
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    assert pids


def test_close_ends_all_children_and_refuses_new_ones() -> None:
    with Supervisor(grace_s=1.0) as supervisor:
        children = [supervisor.spawn(python(FOREVER, sink=lambda line: None)) for _ in range(3)]
    assert all(child.exit_code is not None for child in children)
    with pytest.raises(InvalidSpec, match="closed"):
        supervisor.spawn(python(FOREVER))


PARENT = """
import sys, threading
from shoal_client.local.process import ChildCommand, Supervisor

def start():
    global child
    child = supervisor.spawn(
        ChildCommand(name="child", arguments=("sleep", "600"), sink=lambda line: None)
    )

with Supervisor() as supervisor:
    # From a thread that ends at once: the child must not end with it.
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert child.wait(0.3) is None
    print(child.pid, flush=True)
    child.wait()
"""


ADOPTER = """
import queue, sys, time
from pathlib import Path
from shoal_client.local.leftovers import adopt_orphans
from shoal_client.local.process import ChildCommand, Supervisor

adopt_orphans()
lines = queue.SimpleQueue()
code = "import subprocess as s, os; print(s.Popen(['sleep', '600']).pid, flush=True); os.abort()"
with Supervisor() as supervisor:
    supervisor.spawn(
        ChildCommand(name="child", arguments=(sys.executable, "-c", code), sink=lines.put)
    )
    orphan, deadline_s = Path("/proc", lines.get(timeout=20)), time.monotonic() + 20
    while orphan.exists():
        assert time.monotonic() < deadline_s, (orphan / "stat").read_text()
        time.sleep(0.01)
"""


def test_orphans_of_a_child_are_reaped() -> None:
    """The parent adopts orphans, as process 1 of a container does, and leaves no zombie."""
    done = subprocess.run(
        [sys.executable, "-c", ADOPTER],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_no_child_survives_a_killed_parent() -> None:
    """SIGKILL of the parent ends the child, even if the thread that started it has ended before."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        parent.wait(DEADLINE_S)
        assert await_death(child)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
