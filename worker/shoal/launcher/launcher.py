"""The launcher: starts a host's workers of one job, watches them, and restarts killed ones.

A restarted worker is a new incarnation of the same member. Every exit and halt (SIGSTOP) is
reported to the coordinator at once; most exits even before the kernel has removed the process
(`shoal_client.liveness.lifeline`). The launcher sends heartbeats for its workers, so that a busy
worker does not count as lost.

A worker that was declared lost while it was halted is killed and replaced. A worker that does not
end within the grace time after the job's end is killed, unless its script has left the finished
job. It is abandoned if it hangs in the kernel.

A worker writes to the beat board how its membership ended. Up to the number of restarts, workers
that were fenced or hit a time limit are restarted whatever their error code.
"""

import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.launcher import metrics
from shoal.launcher.output import OUTPUT_S, ReaderGone, WorkerOutput, say
from shoal.launcher.run_config import RunConfig, member_ids, worker_environment
from shoal.launcher.worker_slots import DRAINED, Exit, WorkerSlot
from shoal.launcher.worker_termination import WorkerTermination
from shoal_client.connection.admission import ADMISSION_VARIABLE
from shoal_client.host.beats import HostBeats, WorkerStatus
from shoal_client.host.outputs import HostOutputs
from shoal_client.host.reports import CALL_TIMEOUT_S, FINISHED, HostReporter
from shoal_client.host.stop_orders import StopOrders, next_of
from shoal_client.liveness.beat_board import BeatBoard, MembershipEnding
from shoal_client.liveness.lifeline import ExitWatch
from shoal_client.local.directory import temporary_directory
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_client.local.worker_logs import WorkerLog, log_path, log_root, remove_old
from shoal_proto.errors import Unavailable
from shoal_proto.secrets import LAUNCH_VARIABLE, job_secret
from shoal_proto.v1.membership_pb2 import ReportExitRequest, ReportHaltRequest
from shoal_proto.v1.outputs_pb2 import OutputOwner, ServeOutputRequest

KILLED_ANSWER_S = 0.5
"""Limit of the wait for the coordinator's answer about a killed worker: the job may be over."""
WORKER_ADMISSION_S = 24 * 3600
"""Time that a worker waits to be admitted: long, as the other members train on without a
coordinator."""
NOT_JOINED_S = 120.0
"""Time after which a warning says that no worker has joined: imports and data may take a while."""
_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True)
class _Halted:
    process: Process
    halted: bool


@dataclass(frozen=True)
class _Signalled:
    number: int


@dataclass(frozen=True)
class _GivenUp:
    reason: str


_Event = Process | _Halted | _Signalled | ReaderGone | _GivenUp | WorkerStatus


class Launcher:
    """Launcher of one `shoal run`."""

    def __init__(self, config: RunConfig, orders: StopOrders) -> None:
        """`orders`: signals of this process, also before and after the run."""
        self._config = config
        self._orders = orders
        self._host = socket.gethostname()
        self.slots = [
            WorkerSlot(index=index, member_id=member_id)
            for index, member_id in enumerate(member_ids(config, self._host))
        ]
        root = config.output.log_directory or log_root(config.environment)
        self._logs = [WorkerLog(log_path(root, config.job, each.member_id)) for each in self.slots]
        self._shared_directory = Path()
        # Reentrant, for signal handlers.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._reporter = HostReporter(config.coordinators)
        # A worker that goes on must not wait until the exit of another one is durable.
        self._halt_reporter = HostReporter(config.coordinators)
        self._beats = HostBeats(config.coordinators, self._events.put)
        self._output = WorkerOutput(self._events.put)
        self._reporting = threading.Lock()
        self._reported: set[int] = set()
        self._ended: list[Exit] = []
        self._interrupted = 0
        self._is_unread = False
        self._given_up = False
        self._warn_s = math.inf
        self._worker_ends = WorkerTermination(
            self.slots, job=config.job, grace_s=config.restart.grace_s, say=say
        )

    def run(self) -> int:
        """Start the workers; return the run's exit code when all have ended."""
        remove_old(log_root({}), time.time())
        with self._output:
            self._run_workers()
            return self._report()

    def _run_workers(self) -> None:
        with (
            self._orders.received(lambda number: self._events.put(_Signalled(number))),
            BeatBoard(len(self.slots)) as board,
            temporary_directory("shoal-host-") as self._shared_directory,
            self._reporter,
            self._halt_reporter,
            self._beats,
            self._outputs(),
            self._lifelines(),
            self._open_logs(),
            metrics.serve_metrics(self._config.output.metrics, self.slots),
            Supervisor(on_exit=self._exited, on_stop=self._halted, grace_s=0.5) as supervisor,
        ):
            for slot in self.slots:
                self._start_first(slot, supervisor, board)
            say(_started_text(len(self.slots)))
            self._warn_s = time.monotonic() + NOT_JOINED_S
            while not all(slot.is_over for slot in self.slots):
                event = self._next_event()
                if isinstance(event, Process):
                    self._on_exit(event, board)
                elif isinstance(event, _Halted):
                    self._on_halted(event)
                elif isinstance(event, _Signalled):
                    self._interrupt(event, board)
                elif isinstance(event, ReaderGone):
                    self._end_unread(board)
                elif isinstance(event, _GivenUp):
                    self._end_given_up(event.reason)
                elif isinstance(event, WorkerStatus):
                    self._on_worker_status(event)
                self._start_due(supervisor, board)
                self._end_due(supervisor, board)
                self._warn_if_none_joined(board)
            self._reporter.flush()

    def _report(self) -> int:
        """Say how the run ended, and return its exit code."""
        code = self._exit_code()
        say(f"{self._outcome()}; exit code {code}")
        if self._lost:
            say(str(self._reporter.lost))
        if code == 0 and not any(slot.has_joined for slot in self.slots):
            say(
                f"warning: no worker joined job {self._config.job}: the script never calls"
                f" shoal.join(), and ran {len(self.slots)} times, each time by itself"
            )
        for advice in sorted({slot.advice for slot in self.slots} - {""}):
            say(advice)
        return code

    def give_up(self, reason: str) -> None:
        """End the workers, as their cluster is gone. Callable from any thread."""
        self._events.put(_GivenUp(reason))

    def _next_event(self) -> _Event | None:
        starts_s = (slot.start_at_s for slot in self.slots if slot.start_at_s is not None)
        until_s = min(*starts_s, self._worker_ends.next_s, self._warn_s)
        try:
            return next_of(self._events, until_s - time.monotonic())
        except queue.Empty:
            return None

    def _warn_if_none_joined(self, board: BeatBoard) -> None:
        if time.monotonic() < self._warn_s:
            return
        self._warn_s = math.inf
        if not any(s.has_joined or board.slots[s.index].was_claimed for s in self.slots):
            say(
                f"warning: none of this launcher's workers has joined job {self._config.job} after"
                f" {NOT_JOINED_S:g} s. If the script never calls shoal.join(), each of them trains"
                " by itself"
            )

    def _start_due(self, supervisor: Supervisor, board: BeatBoard) -> None:
        for slot in self.slots:
            if slot.start_at_s is None:
                continue
            if self._is_ending:
                slot.start_at_s = None
                self._ended.append(slot.exits[-1])
            elif time.monotonic() >= slot.start_at_s:
                slot.start_at_s = None
                self._start_again(slot, supervisor, board)

    def _start_first(self, slot: WorkerSlot, supervisor: Supervisor, board: BeatBoard) -> None:
        try:
            self._start(slot, supervisor, board)
        except OSError as error:
            raise Unavailable(
                f"{slot.member_id} cannot be started",
                seen=error.strerror or str(error),
                expected=f"processes and threads for {len(self.slots)} workers",
                fix="Start fewer workers (-n), or raise the limit (ulimit -u, or pids of the"
                " container).",
            ) from error

    def _start_again(self, slot: WorkerSlot, supervisor: Supervisor, board: BeatBoard) -> None:
        try:
            self._start(slot, supervisor, board)
        except OSError as error:
            # The other workers train on. A start that the kernel refuses counts as a restart.
            slot.exits.append(Exit(code=os.EX_TEMPFAIL, ending=MembershipEnding.PASSING))
            self._on_ended(slot, f"could not be started ({error.strerror or error})")

    def _start(self, slot: WorkerSlot, supervisor: Supervisor, board: BeatBoard) -> None:
        board.slots[slot.index].clear()
        environment = worker_environment(self._config, slot.member_id, slot.index)
        environment["SHOAL_BEATS"] = board.address(slot.index)
        environment["SHOAL_SHARED_DIRECTORY"] = str(self._shared_directory)
        environment[LAUNCH_VARIABLE] = slot.launch_secret
        environment.setdefault(ADMISSION_VARIABLE, str(WORKER_ADMISSION_S))
        slot.process = supervisor.spawn(
            ChildCommand(
                name=slot.member_id,
                arguments=(sys.executable, "-u", *self._config.target),
                environment=environment,
                sink=self._sink(slot),
            )
        )
        process, life = slot.process, board.slots[slot.index].lifeline
        self._beats.started(process.pid, board.slots[slot.index], self._config.job)
        # Without a thread for it, the exit is reported once the kernel has removed the process.
        with suppress(RuntimeError):
            slot.watch = ExitWatch(life, process.pid, lambda code: self._report_exit(process, code))

    # --- called on the threads that watch a worker, which see its events in order ---

    def _exited(self, process: Process) -> None:
        code = process.exit_code
        assert code is not None
        self._report_exit(process, code)
        self._events.put(process)

    def _report_exit(self, process: Process, code: int) -> None:
        """Report each process' exit once: the lifeline shows it first, and the kernel later."""
        with self._reporting:
            if process.pid in self._reported:
                return
            self._reported.add(process.pid)
        self._beats.ended(process.pid)
        self._reporter.report(
            ReportExitRequest(
                job=self._config.job,
                member_id=process.name,
                pid=process.pid,
                host=self._host,
                exit_code=code,
                launch_secret=self._slot_of(process).launch_secret,
            )
        )

    def _slot_of(self, process: Process) -> WorkerSlot:
        return next(each for each in self.slots if each.member_id == process.name)

    def _halted(self, process: Process, halted: bool) -> None:
        # First, so that no later heartbeat says that the worker runs.
        self._beats.halted(process.pid, halted)
        self._halt_reporter.report(
            ReportHaltRequest(
                job=self._config.job,
                member_id=process.name,
                pid=process.pid,
                host=self._host,
                halted=halted,
                launch_secret=self._slot_of(process).launch_secret,
            )
        )
        self._events.put(_Halted(process, halted))

    # --- called on the launcher's own thread ---

    def _on_exit(self, process: Process, board: BeatBoard) -> None:
        slot = next((each for each in self.slots if each.process is process), None)
        if slot is None:
            return  # an abandoned process has ended after all
        code = process.exit_code
        assert code is not None
        if slot.watch is not None:
            slot.watch.close()
            slot.watch = None
        self._reported.discard(process.pid)
        process.drain(OUTPUT_S)
        self._output.flush()
        slot.has_joined |= board.slots[slot.index].was_claimed
        slot.process, slot.halted, slot.killed_s = None, False, None
        slot.exits.append(Exit(code=code, ending=board.slots[slot.index].ending))
        if code == 0 or (code == DRAINED and not self._worker_ends.were_signalled):
            # The answer says if the worker has finished the job, and if the job was stopped.
            self._reporter.flush()
        self._on_ended(slot, str(slot.exits[-1]))

    def _on_ended(self, slot: WorkerSlot, how: str) -> None:
        """Plan the slot's next process, unless the newest exit was the last."""
        exited = slot.exits[-1]
        if self._may_restart(slot):
            pause_s = slot.pause_s
            slot.start_at_s = time.monotonic() + pause_s
            again = f"started again in {pause_s:g} s" if pause_s else "started again"
            tries = f"restart {len(slot.exits)} of {self._config.restart.max_restarts}"
            say(f"{slot.member_id} {how}; {again} ({tries})")
            return
        self._ended.append(exited)
        is_shown = self._over and exited.code not in (0, DRAINED)
        over = f"; job {self._config.job} is {self._over}" if is_shown else ""
        say(f"{slot.member_id} {how}{over}")
        self._end_if_starved()

    def _may_restart(self, slot: WorkerSlot) -> bool:
        last = slot.exits[-1]
        if last.code in (0, DRAINED) or self._is_ending:
            return False
        if last.ending not in (
            MembershipEnding.UNKNOWN,
            MembershipEnding.FENCED,
            MembershipEnding.PASSING,
        ):
            return False
        if last.code > 0 and not last.is_temporary and self._config.restart.restart_on == "signal":
            return False
        # The answer contains the job's phase.
        self._reporter.flush(KILLED_ANSWER_S if last.code < 0 else CALL_TIMEOUT_S)
        return not self._over and len(slot.exits) <= self._config.restart.max_restarts

    @property
    def _is_ending(self) -> bool:
        """True if no worker is to be started any more."""
        return self._worker_ends.were_signalled or self._completed or bool(self._over)

    @property
    def _over(self) -> str:
        """The job's phase if it is LOST, STOPPED or FAILED; else empty, also once the job was
        completed."""
        return "" if self._completed else self._reporter.final_phase

    @property
    def _lost(self) -> bool:
        return self._reporter.lost is not None and not self._completed

    @property
    def _completed(self) -> bool:
        """True if a worker has finished the job, or found it finished. A script that ends before
        the last batch does not finish it."""
        if any(slot.joined_too_late for slot in self.slots):
            return True
        return self._num_done > 0 and not self._reporter.is_unfinished

    @property
    def _num_done(self) -> int:
        return sum(any(each.code == 0 for each in slot.exits) for slot in self.slots)

    def _end_if_starved(self) -> None:
        num_left = sum(not slot.is_over for slot in self.slots)
        few = 0 < num_left < self._config.min_members
        if not (self._config.alone and few) or self._completed or self._worker_ends.were_signalled:
            return
        say(
            f"{num_left} workers left, at least {self._config.min_members} needed, and no other can"
            " join: ending them"
        )
        self._worker_ends.order_stop()

    def _end_given_up(self, reason: str) -> None:
        self._given_up = True
        say(f"ending the workers: {reason}")
        self._worker_ends.order_stop()

    def _on_worker_status(self, status: WorkerStatus) -> None:
        if status.job == self._config.job and status.phase:
            self._reporter.note_phase(status.phase)
        self._worker_ends.kill_if_lost(status)

    def _end_due(self, supervisor: Supervisor, board: BeatBoard) -> None:
        over = self._over or (FINISHED if self._reporter.finished else "")
        self._worker_ends.kill_overdue(over, board)
        for slot in self._worker_ends.left_behind(ends=bool(over) or self._is_ending):
            assert slot.process is not None
            supervisor.leave(slot.process)
            # Its thread may wait for the lifeline as long as the process hangs.
            slot.process = slot.watch = None
            slot.exits.append(Exit(code=-signal.SIGKILL, ending=MembershipEnding.UNKNOWN))
            self._ended.append(slot.exits[-1])

    def _interrupt(self, event: _Signalled, board: BeatBoard) -> None:
        # After the first signal, workers finish their step. A second signal kills them.
        if self._interrupted:
            self._worker_ends.kill(self._worker_ends.running)
            return
        self._interrupted = event.number
        name = signal.Signals(event.number).name
        them = "it" if len(self._worker_ends.running) == 1 else "them"
        say(f"{name}: {self._consequence(board)}; a second signal kills {them}")
        self._worker_ends.order_stop()

    def _end_unread(self, board: BeatBoard) -> None:
        # As in any pipeline: end the work when the reader is gone. Ctrl-C ends both, in any order.
        self._is_unread = True
        if not self._worker_ends.were_signalled:
            say(f"the reader of stdout has ended: {self._consequence(board)}")
            self._worker_ends.order_stop()

    def _consequence(self, board: BeatBoard) -> str:
        """Say what an order to stop does to the workers."""
        running = self._worker_ends.running
        num_joined = sum(board.slots[slot.index].was_claimed for slot in running)
        return _drain_text(num_joined, len(running) - num_joined)

    @property
    def _ended_by(self) -> int:
        """Signal that ends the run, which is SIGTERM if the reader of stdout has ended; 0: none."""
        return self._interrupted or (signal.SIGTERM if self._is_unread else 0)

    def _exit_code(self) -> int:
        """Return the run's exit code: 0 for a completed job, even after a signal, unless a script
        has failed, or a worker has failed or was killed after it had completed the job."""
        if self._completed:
            # A replacement that was refused after the end, and a worker that was fenced while the
            # others trained on, are not failures of the job.
            failed = [slot.exits for slot in self.slots if slot.exits[-1].code != 0]
            firsts = [exits[0] for exits in failed if exits[0].is_scripts_own]
            lasts = [exits[-1] for exits in failed if exits[-1].failed_when_done]
            if not firsts and self._ended_by and any(each.code < 0 for each in lasts):
                return 128 + self._ended_by
            return next((_status_of(each.code) for each in firsts + lasts), 0)
        if self._given_up:
            return 1
        if self._ended_by:
            return 128 + self._ended_by
        # Workers that join a stopped job are refused.
        is_stopped = self._over == "stopped"
        refused = MembershipEnding.REFUSED
        codes = [e.code for e in self._ended if not (is_stopped and e.ending is refused)]
        failing = (code for code in codes if code not in (0, DRAINED))
        first = next(failing, 0 if 0 in codes else DRAINED)
        if not first:
            return 0  # No script has failed; `_outcome` says that the job is not finished.
        return _status_of(first)

    def _outcome(self) -> str:
        idle = [slot.member_id for slot in self.slots if slot.joined_too_late]
        last = {s.member_id: s.exits[-1].code for s in self.slots if not s.joined_too_late}
        done = sum(code == 0 for code in last.values())
        drained = [member for member, code in last.items() if code == DRAINED]
        lost = [member for member, code in last.items() if code not in (0, DRAINED)]
        how = "completed" if self._completed or not done else "ended before the last batch"
        text = f"{done} of {len(self.slots)} workers {how}"
        if done and not self._completed:
            text += f" (job {self._config.job} is not finished)"
        if idle:
            text += f", not needed: {', '.join(idle)}"
        if drained:
            text += f", drained: {', '.join(drained)}"
        return f"{text}, not {', '.join(lost)}" if lost else text

    def _on_halted(self, event: _Halted) -> None:
        self._slot_of(event.process).halted = event.halted
        how = "was halted (SIGSTOP)" if event.halted else "goes on (SIGCONT)"
        say(f"{event.process.name} {how}")

    def _sink(self, slot: WorkerSlot) -> Callable[[str], None]:
        prefix, kept = f"[{slot.member_id}] ", self._logs[slot.index]
        if self._config.colour:
            prefix = f"\x1b[{_COLOURS[slot.index % len(_COLOURS)]}m{prefix}\x1b[0m"

        def write(line: str) -> None:
            if not kept.problem:
                kept.write(line)
                if kept.problem:
                    say(f"the output of {slot.member_id} is no longer kept: {kept.problem}")
            slot.printed.add(line)
            self._output.print(f"{prefix}{line}")

        return write

    def _outputs(self) -> HostOutputs:
        config = self._config
        request = ServeOutputRequest(
            job=config.job,
            host=self._host,
            members=[
                OutputOwner(member_id=slot.member_id, launch_secret=slot.launch_secret)
                for slot in self.slots
            ],
            job_secret=job_secret(config.environment),
        )
        tails = {slot.member_id: slot.printed for slot in self.slots}
        return HostOutputs(self._beats.coordinators, request, tails)

    @contextmanager
    def _lifelines(self) -> Iterator[None]:
        """Close the watches, except those of workers that hang in the kernel: they do not end."""
        try:
            yield
        finally:
            for slot in self.slots:
                hangs = slot.process is not None and slot.process.exit_code is None
                if slot.watch is not None and not hangs:
                    slot.watch.close()

    @contextmanager
    def _open_logs(self) -> Iterator[None]:
        try:
            yield
        finally:
            for each in self._logs:
                each.close()


def _started_text(num: int) -> str:
    who = "1 worker has started; it joins" if num == 1 else f"{num} workers have started; they join"
    return f"{who} the job after importing torch"


def _status_of(code: int) -> int:
    """Return the exit status of a shell for an exit code that is negative after a signal."""
    return code if code >= 0 else 128 - code


def _drain_text(num_joined: int, num_starting: int) -> str:
    parts = []
    if num_joined:
        one = "1 worker finishes its step and ends"
        parts.append(one if num_joined == 1 else f"{num_joined} workers finish their step and end")
    if num_starting:
        one = "1 worker ends before it has joined"
        several = f"{num_starting} workers end before they have joined"
        parts.append(one if num_starting == 1 else several)
    return ", ".join(parts) or "no worker runs"
