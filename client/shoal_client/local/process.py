"""Child processes that do not outlive their parent, and whose end is noticed at once.

Each child starts as a guard, a small Python program that asks the kernel to kill it when its parent
dies (PR_SET_PDEATHSIG), and then becomes the command. The kernel sends the signal when the *thread*
that forked ends, so a Supervisor forks on a thread of its own.

Each child leads its own process group: Ctrl-C in the terminal reaches only the parent, and killing
a child also kills the child's children.
"""

import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from shoal_proto.errors import InvalidSpec

KILLED_S = 5.0
"""A child that hangs in the kernel for this time after SIGKILL is left behind."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is passed to the sink in pieces."""

_GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot run {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""


@dataclass(frozen=True, kw_only=True)
class ChildCommand:
    """Command to run, and the destination of its output."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] | None = None
    """The whole environment; None: this process' own."""
    log_path: Path | None = None
    """Stdout and stderr are appended to this file."""
    sink: Callable[[str], None] | None = None
    """Gets each line of stdout and stderr, without its end, on a thread for this child. Without a
    sink and a log_path the child writes to this process' stdout and stderr."""
    stdin: int | None = None
    """File descriptor that the child reads; None: nothing."""

    def __post_init__(self) -> None:
        if not self.arguments:
            raise InvalidSpec(f"nothing to run for {self.name}", expected="a command")
        if self.sink is not None and self.log_path is not None:
            raise InvalidSpec(f"two outputs for {self.name}", expected="a sink or a log_path")


class Process:
    """A child. Every method is safe from any thread."""

    def __init__(self, command: ChildCommand, popen: subprocess.Popen[bytes]) -> None:
        self.command = command
        self.name = command.name
        self.pid = popen.pid
        self.started_s = time.monotonic()
        self._popen = popen
        self._reaping = threading.Lock()
        self._exited = threading.Event()
        self._pump: threading.Thread | None = None

    @property
    def exit_code(self) -> int | None:
        """Exit code; -N if signal N killed the process; None while it runs."""
        return self._popen.returncode if self._exited.is_set() else None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the exit and return the code; None after `timeout_s`."""
        self._exited.wait(timeout_s)
        return self.exit_code

    def drain(self, timeout_s: float) -> None:
        """Wait, after the exit, until the child's last lines have reached the sink."""
        if self._pump is not None:
            # A descendant may keep the pipe open, so the wait has a limit.
            self._pump.join(timeout_s)

    def send_signal(self, number: int) -> None:
        """Signal the child itself, unless it has exited."""
        # Under the lock no other process can get the pid.
        with self._reaping:
            if self._popen.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the child and all of its process group."""
        with self._reaping:
            if self._popen.returncode is None:
                os.killpg(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, then SIGCONT: a child that SIGSTOP has suspended handles no SIGTERM."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def stop(self, grace_s: float) -> int | None:
        """Send SIGTERM, then SIGKILL after `grace_s`. Returns the exit code; None if the child
        hangs in the kernel."""
        stop_all([self], grace_s)
        return self.exit_code

    def _watch(
        self,
        on_exit: Callable[["Process"], None],
        on_stop: Callable[["Process", bool], None],
    ) -> None:
        events = os.WEXITED | os.WSTOPPED | os.WCONTINUED
        while True:
            seen = os.waitid(os.P_PID, self.pid, events | os.WNOWAIT)
            assert seen is not None
            if seen.si_code in (os.CLD_STOPPED, os.CLD_CONTINUED):
                # Consume the event, or the next wait returns it again. Report the consumed event:
                # it may be a SIGCONT that followed.
                halts = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
                taken = os.waitid(os.P_PID, self.pid, halts)
                if taken is not None:
                    on_stop(self, taken.si_code == os.CLD_STOPPED)
                continue
            break
        with self._reaping:
            # Until the child is reaped, no other group can get its number.
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
        self._exited.set()
        on_exit(self)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap the rest of the killed group. Its processes are this process' children if this is
        process 1, as in a container, or adopts orphans: no other process would reap them. Those in
        a session of their own are left."""
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)


def _pump(stream: IO[bytes], sink: Callable[[str], None]) -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            sink(line.decode("utf-8", "replace").rstrip("\r\n"))


class Supervisor:
    """Starts children and stops them at the end of its `with` block. `on_exit` and `on_stop` (True:
    SIGSTOP has suspended the child, False: it continues) run on the child's thread, and must return
    quickly.
    """

    def __init__(
        self,
        *,
        on_exit: Callable[[Process], None] = lambda process: None,
        on_stop: Callable[[Process, bool], None] = lambda process, halted: None,
        grace_s: float = 5.0,
    ) -> None:
        self._on_exit = on_exit
        self._on_stop = on_stop
        self._grace_s = grace_s
        self._orders: queue.SimpleQueue[tuple[ChildCommand, Future[Process]] | None] = (
            queue.SimpleQueue()
        )
        self._forker = threading.Thread(target=self._fork, name="shoal-fork", daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._processes: list[Process] = []

    def __enter__(self) -> "Supervisor":
        # A parent may have left SIGCHLD ignored: the kernel then keeps no exit code of a child.
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._forker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def spawn(self, command: ChildCommand) -> Process:
        """Start a child. Raises OSError if the kernel refuses, InvalidSpec after `close`. A command
        that cannot be run exits with 127."""
        order: Future[Process] = Future()
        with self._lock:
            if self._closed:
                raise InvalidSpec(f"cannot start {command.name}", seen="a closed supervisor")
            self._orders.put((command, order))
        return order.result()

    @property
    def running(self) -> list[Process]:
        """Children that have not exited, in the order of their start."""
        with self._lock:
            self._processes = [each for each in self._processes if each.exit_code is None]
            return list(self._processes)

    def leave(self, process: Process) -> None:
        """Forget a child that hangs in the kernel."""
        with self._lock:
            self._processes.remove(process)

    def close(self) -> None:
        """Stop every child (SIGTERM, later SIGKILL), and refuse to start others."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            stop_all(self.running, self._grace_s)
        except BaseException:
            # A Ctrl-C during the grace time, for example, must not leave children running.
            kill_all(self.running)
            raise
        finally:
            self._orders.put(None)
            self._forker.join()

    def _fork(self) -> None:
        while (item := self._orders.get()) is not None:
            command, order = item
            try:
                order.set_result(self._start(command))
            except BaseException as error:  # noqa: BLE001 - raised by `spawn`, on its thread
                order.set_exception(error)

    def _start(self, command: ChildCommand) -> Process:
        guard = (sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()))
        output: int | IO[bytes] | None = subprocess.PIPE if command.sink is not None else None
        log = None
        if command.log_path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log = output = os.fdopen(os.open(command.log_path, flags, 0o600), "ab", buffering=0)
        try:
            popen = subprocess.Popen(
                [*guard, *command.arguments],
                stdin=subprocess.DEVNULL if command.stdin is None else command.stdin,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                env=None if command.environment is None else dict(command.environment),
                process_group=0,
            )
        finally:
            if log is not None:
                log.close()
        process = Process(command, popen)
        try:
            self._follow(process, popen)
        except RuntimeError as error:
            # The kernel refuses a thread, and nothing else would notice the child's end.
            process.kill()
            popen.wait()
            raise OSError(errno.EAGAIN, f"no thread to watch it: {error}") from error
        with self._lock:
            self._processes.append(process)
        return process

    def _follow(self, process: Process, popen: subprocess.Popen[bytes]) -> None:
        if process.command.sink is not None:
            assert popen.stdout is not None
            arguments = (popen.stdout, process.command.sink)
            process._pump = threading.Thread(target=_pump, args=arguments, daemon=True)
            process._pump.start()
        threading.Thread(
            target=process._watch,
            args=(self._on_exit, self._on_stop),
            name=f"shoal-watch-{process.name}",
            daemon=True,
        ).start()


def stop_all(processes: Sequence[Process], grace_s: float) -> None:
    """Stop several children, with one grace time for all of them."""
    for process in processes:
        process.terminate()
    _wait_all(processes, grace_s)
    kill_all(processes)


def kill_all(processes: Sequence[Process]) -> None:
    """Kill several children, and wait for their end for at most KILLED_S."""
    for process in processes:
        process.kill()
    _wait_all(processes, KILLED_S)


def _wait_all(processes: Sequence[Process], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    for process in processes:
        process.wait(max(0.0, deadline_s - time.monotonic()))
