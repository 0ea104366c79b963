"""The launchers of `shoal run --hosts`: one on each host, over an `ssh` connection.

The process on a host is `shoal.launcher.on_host`. If a connection ends before the greeting, the
host cannot be used. If it ends without an exit code, the host was lost.
"""

import json
import math
import os
import queue
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from ipaddress import ip_address
from types import TracebackType

from shoal.launcher.hosts import RunHost, WorkerCount
from shoal.launcher.on_host import HostEnding, HostGreeting, LaunchOrder
from shoal.launcher.output import OUTPUT_S, ReaderGone, WorkerOutput
from shoal.launcher.run_config import RunConfig, worker_files
from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import CertificateFolder
from shoal_client.commands.jobs import ANSWER_WITHIN_S, phase_of
from shoal_client.host.reports import FINISHED
from shoal_client.host.stop_orders import StopOrders, next_of
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_client.remote.ssh import ADVICE, MARK, check_ssh, command_on
from shoal_proto.errors import InvalidSpec, ShoalError, Unavailable
from shoal_proto.terminal import printable
from shoal_proto.tls.identity import CA_FILE, VARIABLES
from shoal_proto.tls.names import Caller, CertificateRole

GREETING_S = 90.0
"""Time for a host to greet: a busy host may start Python slowly."""
SLOW_S = 10.0
"""Time after which hosts without a greeting are named."""
KILLED_S = 15.0
"""Time for the hosts to end after a second Ctrl-C."""
END_S = 30.0
"""Time for the hosts to end after the workers' grace time."""
PHASE_S = 5.0
"""Time limit of a question about the job's phase once an order to end was given."""
LAST_LINES = 3
VALID = timedelta(days=30)
"""Validity of the hosts' certificate, which is for this job."""
INSISTED = 2
"""Number of signals that are passed on; the next one ends the connections."""
DRAINED = 128 + signal.SIGTERM
PASSED_ON = ("SHOAL_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTHON")
KEPT_BACK = {
    *(*VARIABLES, "SHOAL_TLS", "SHOAL_COORDINATOR", "SHOAL_HTTP"),
    *("SHOAL_MEMBER_ID", "SHOAL_ADDRESS", "SHOAL_LOG_DIR"),
}
"""Variables that hosts do not get: their values differ, or options give them."""


Sink = Callable[[str], None]
_Order = int | str | ReaderGone
"""A signal, the reason to give up, or the end of the reader: the workers are to end."""
_Message = HostGreeting | HostEnding | Process | _Order
"""A host's message or ended process; without a host, an order."""


class _Connection:
    def __init__(self, host: RunHost) -> None:
        self.host = host
        self.process: Process | None = None
        self.orders = -1
        self.greeting: HostGreeting | None = None
        self.exit_code: int | None = None
        """Exit code of the host's launcher; None if it runs, or the host was lost."""
        self.is_over = False
        self.last_lines: list[str] = []
        """Newest lines before the greeting: if there is no greeting, they say why."""

    def start(self, command: Sequence[str], supervisor: Supervisor, sink: Sink) -> None:
        stdin, self.orders = os.pipe()
        try:
            self.process = supervisor.spawn(
                ChildCommand(name=self.host.name, arguments=command, sink=sink, stdin=stdin)
            )
        finally:
            os.close(stdin)

    def write(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # the connection's end is an event
            while data:
                data = data[os.write(self.orders, data) :]

    def close(self) -> None:
        if self.orders >= 0:
            os.close(self.orders)
            self.orders = -1

    @property
    def reason(self) -> str:
        if self.greeting is not None and self.greeting.version != version("shoal"):
            return f"it has shoal {self.greeting.version}, and this machine has {version('shoal')}"
        if self.last_lines:
            return "; ".join(self.last_lines)
        ended = self.process is not None and self.process.exit_code is not None
        return "it ended without a message" if ended else f"no answer within {GREETING_S:g} s"


class HostLaunchers:
    """The launchers on all hosts. Call `connect`, then `run`. The end of the block ends them."""

    def __init__(self, config: RunConfig, orders: StopOrders, say: Callable[[str], None]) -> None:
        self._config = config
        self._orders = orders
        self._say = say
        self._events: queue.SimpleQueue[tuple[_Connection | None, _Message]] = queue.SimpleQueue()
        self._by_name = {host.name: _Connection(host) for host in config.over_ssh.hosts}
        self._connections = [*self._by_name.values()]
        self._supervisor = Supervisor(on_exit=self._exited, grace_s=5.0)
        self._output = WorkerOutput(lambda gone: self._events.put((None, gone)))
        self._interrupted: list[int] = []
        self._is_unread = False
        self._num_orders = 0
        """Number of orders that the hosts have got: the first one to drain, the second to kill."""
        self._give_up_s = math.inf
        self._given_up = ""
        self._is_phase_unknown = False
        """True if no coordinator has answered since the first order."""
        self._codes: list[int] = []
        self._codes_if_finished: list[int] = []
        """Exit codes that count although the job is finished."""

    def __enter__(self) -> "HostLaunchers":
        self._output.__enter__()
        self._supervisor.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._by_name.values():
            each.close()
        try:
            self._supervisor.close()
        finally:
            self._output.__exit__(kind, error, trace)

    # --- connecting ---

    def connect(self) -> RunConfig:
        """Connect to the hosts; return the config for those that can be used.

        Raises Unavailable for too few hosts, and InvalidSpec for bad bounds, or if ssh is not
        installed.
        """
        check_ssh([*self._by_name])
        for each in self._connections:
            each.start(self._command(each.host), self._supervisor, self._sink(each))
        self._await_greetings()
        usable = [each for each in self._connections if self._is_usable(each)]
        for each in self._connections:
            if each not in usable:
                self._say(f"{each.host.name} is left out: {printable(each.reason)}")
                each.close()
        least = max(1, self._config.over_ssh.min_nodes)
        if len(usable) < least:
            raise Unavailable(
                "too few hosts can be used",
                seen=f"{len(usable)} of {len(self._connections)}",
                expected=f"at least {least}",
                fix=ADVICE,
            )
        self._connections = usable
        counts = [(each.host.name, _greeted(each).num_workers) for each in usable]
        self._say(f"workers: {', '.join(f'{number} on {name}' for name, number in counts)}")
        self._config = self._config.on_hosts([number for _, number in counts])
        return self._config

    @property
    def address(self) -> str:
        """Address of this machine for the hosts; loopback if they are this machine. Raises
        InvalidSpec if it is not known."""
        if self._config.over_ssh.address:
            return self._config.over_ssh.address
        greetings = [_greeted(each) for each in self._connections]
        seen = Counter(each.seen_address for each in greetings if _is_useful(each.seen_address))
        if not seen:
            return "127.0.0.1"
        address = seen.most_common(1)[0][0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                raise InvalidSpec(
                    "the address of this machine for the hosts is not known",
                    seen=f"the hosts see {address}, which is not an address of this machine",
                    expected="an address that the hosts reach, without a router or jump host",
                    fix="Give it with --host-address ADDRESS.",
                ) from None
        return address

    def _command(self, host: RunHost) -> Sequence[str]:
        count = self._config.num_workers
        usual = count.text if isinstance(count, WorkerCount) else str(count)
        script = () if self._config.module else (self._config.script[0],)
        python = self._config.over_ssh.python or sys.executable
        words = (
            *(python, "-P", "-u", "-m", "shoal.launcher.on_host"),
            *(os.getcwd(), host.num_workers or usual, *script),  # noqa: PTH109 - text, not a path
        )
        return command_on(host.name, words)

    def _await_greetings(self) -> None:
        begun_s, waiting, limit_s = time.monotonic(), set(self._connections), SLOW_S
        while waiting:
            try:
                connection, message = next_of(self._events, begun_s + limit_s - time.monotonic())
            except queue.Empty:
                if limit_s == GREETING_S:
                    return
                limit_s = GREETING_S
                names = ", ".join(sorted(each.host.name for each in waiting))
                self._say(f"no answer yet from {names}; they have {limit_s:g} s in all")
                continue
            assert connection is not None
            if isinstance(message, HostGreeting):
                connection.greeting = message
            else:
                connection.is_over = True
            waiting.discard(connection)

    def _is_usable(self, connection: _Connection) -> bool:
        greeting = connection.greeting
        is_same = greeting is not None and greeting.version == version("shoal")
        return is_same and not connection.is_over

    # --- running ---

    def run(self, config: RunConfig) -> int:
        """Have the hosts run the job; return the exit code when all have ended, after a third
        signal, or at the time limit.

        `config`: as `connect` returned it, with the coordinators.
        """
        self._config = config
        files = _files_for_hosts(config)
        with self._orders.received(lambda number: self._events.put((None, number))):
            for each in self._connections:
                order = LaunchOrder(
                    arguments=_arguments(config, _greeted(each).num_workers),
                    environment=_environment(config.environment),
                    files=files,
                )
                each.write(json.dumps(asdict(order)).encode() + b"\n")
            while not all(each.is_over for each in self._connections):
                try:
                    connection, message = next_of(self._events, self._left_s())
                except queue.Empty:
                    names = [each.host.name for each in self._connections if not each.is_over]
                    self._say(f"did not end in time and are left behind: {', '.join(names)}")
                    break
                self._on_event(connection, message)
                if len(self._interrupted) > INSISTED:
                    break
        code = self._exit_code()
        self._say(f"exit code {code}")
        return code

    def give_up(self, reason: str) -> None:
        """End the workers for this reason. Callable from any thread."""
        self._events.put((None, reason))

    def _on_event(self, connection: _Connection | None, message: _Message) -> None:
        if connection is None:
            assert isinstance(message, _Order)
            self._end(message)
        elif connection not in self._connections:
            pass  # it was left out
        elif isinstance(message, HostEnding):
            connection.exit_code = message.exit_code
            self._codes.append(message.exit_code)
            if self._counts_if_finished(message.exit_code):
                self._codes_if_finished.append(message.exit_code)
        elif isinstance(message, Process):
            connection.is_over = True
            if connection.exit_code is None:
                self._say(f"{connection.host.name} was lost: its connection has ended")
            self._end_if_starved()

    def _end(self, order: _Order) -> None:
        """End the hosts' launchers."""
        if isinstance(order, ReaderGone):
            # As in any pipeline: end the work when the reader is gone. Ctrl-C ends both.
            self._is_unread = True
            if self._num_orders:
                return
            self._say("the reader of stdout has ended: workers finish their step and end")
        elif isinstance(order, str):
            self._given_up = order
            self._say(f"ending the workers: {order}")
        else:
            self._interrupted.append(order)
            name, again = signal.Signals(order).name, len(self._interrupted) > 1
            self._say(
                f"{name}: workers are killed"
                if again
                else f"{name}: workers finish their step and end; a second signal kills them"
            )
        again = len(self._interrupted) > 1
        if self._num_orders > again:
            return  # the hosts have got this order
        self._num_orders += 1
        limit_s = KILLED_S if again else self._config.restart.grace_s + END_S
        self._give_up_s = time.monotonic() + limit_s
        for each in self._connections:
            if not each.is_over:
                each.write(b"\n")

    def _end_if_starved(self) -> None:
        num_left = sum(_greeted(each).num_workers for each in self._connections if not each.is_over)
        codes = (each.exit_code for each in self._connections)
        if (
            not 0 < num_left < self._config.min_members
            or not self._config.alone
            or self._num_orders
            or 0 in codes
        ):
            return
        least = self._config.min_members
        self.give_up(f"{num_left} workers left, at least {least} needed, and no other can join")

    def _left_s(self) -> float:
        return self._give_up_s - time.monotonic()

    def _counts_if_finished(self, code: int) -> bool:
        """True if a launcher's code counts although the job is finished. Workers that were killed
        or drained before the job's end do not count: the others went on without them."""
        if code < 128:
            return True
        if self._num_orders and not self._ended_by:
            return False
        return self._phase == FINISHED

    def _exit_code(self) -> int:
        """Return the run's exit code. Lost hosts do not count in a finished job."""
        phase = self._phase
        if phase:
            self._say(f"job {self._config.job} is {phase}")
        codes = self._codes_if_finished if phase == FINISHED else self._codes
        failed = [code for code in codes if code not in (0, DRAINED)]
        if phase == FINISHED:
            was_killed = bool(failed) and failed[0] >= 128
            return self._ended_by if was_killed and self._ended_by else (failed or [0])[0]
        if self._given_up:
            return 1
        if self._ended_by:
            return self._ended_by
        if failed:
            return failed[0]
        if not self._codes:
            return 1
        return 0 if 0 in self._codes else DRAINED

    @property
    def _phase(self) -> str:
        """The job's phase; empty if it is not known."""
        if self._is_phase_unknown:
            return ""
        # A second Ctrl-C takes effect only after this call.
        limit_s = PHASE_S if self._num_orders else ANSWER_WITHIN_S
        with suppress(ShoalError):
            return phase_of(self._config.coordinators, self._config.job, limit_s)
        # A user who has pressed Ctrl-C waits once for coordinators that are gone, not per host.
        self._is_phase_unknown = self._num_orders > 0
        return ""

    @property
    def _ended_by(self) -> int:
        """Exit code of a run that a signal or the end of the reader has ended; 0: neither."""
        signals = [*self._interrupted, *([signal.SIGTERM] if self._is_unread else [])]
        return 128 + signals[0] if signals else 0

    # --- called on the threads of the connections ---

    def _exited(self, process: Process) -> None:
        process.drain(OUTPUT_S)  # its output has the exit code
        self._output.flush()
        self._events.put((self._by_name[process.name], process))

    def _sink(self, connection: _Connection) -> Sink:
        def take(line: str) -> None:
            before, mark, text = line.partition(MARK)
            # A shell's start-up file may print without a line's end.
            is_message = mark and (not before or connection.greeting is None)
            if is_message and (message := _message(text)):
                self._events.put((connection, message))
            elif connection.greeting is None:
                connection.last_lines = [*connection.last_lines, line][-LAST_LINES:]
            else:
                self._output.print(f"{connection.host.name}: {line}")

        return take


def _greeted(connection: _Connection) -> HostGreeting:
    assert connection.greeting is not None
    return connection.greeting


def _message(text: str) -> HostGreeting | HostEnding | None:
    try:
        content = json.loads(text)
        return HostEnding(**content) if "exit_code" in content else HostGreeting(**content)
    except (ValueError, TypeError):
        return None


def _is_useful(address: str) -> bool:
    """True for an IP address to which other machines can connect."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return not parsed.is_loopback and "%" not in address


def _files_for_hosts(config: RunConfig) -> Mapping[str, str]:
    """Return the hosts' TLS files, by name: a new certificate for this job if this machine has the
    authority's key, else this machine's own certificate."""
    files = worker_files(config)
    if files is None:
        return {}
    folder = CertificateFolder(files.ca.parent)
    cert, key = files.cert, files.key
    name = CertificateRole.WORKER.value
    if files.ca.name == CA_FILE and folder.can_issue:
        caller = Caller(CertificateRole.WORKER, name, config.job)
        issued = folder.issue_for_another_machine(CertificateHolder(caller=caller, valid=VALID))
        texts = (files.ca.read_text(), issued.cert.decode(), issued.key.decode())
    else:
        texts = (files.ca.read_text(), cert.read_text(), key.read_text())
    return dict(zip((CA_FILE, f"{name}.crt", f"{name}.key"), texts, strict=True))


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(PASSED_ON) and name not in KEPT_BACK
    }


def _arguments(config: RunConfig, num_workers: int) -> Sequence[str]:
    restart, output = config.restart, config.output
    options: dict[str, object] = {
        "-n": num_workers,
        "--job": config.job,
        "--coordinator": ",".join(config.coordinators),
        "--min": config.min_members,
        "--max": config.max_members,
        "--desired": config.desired_members,
        "--max-restarts": restart.max_restarts,
        "--restart-on": restart.restart_on,
        "--grace-s": repr(restart.grace_s),
    }
    if output.metrics:
        options["--metrics"] = output.metrics
    if output.log_directory is not None:
        options["--log-dir"] = output.log_directory
    words = [str(word) for option in options.items() for word in option]
    flags = [*(["--verbose"] if output.verbose else []), *(["-m"] if config.module else [])]
    return ("run", *words, *flags, "--", *config.script)
