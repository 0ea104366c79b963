"""Ends workers that do not end by themselves: asks, kills, or abandons them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence

from shoal.launcher.worker_slots import WorkerSlot
from shoal_client.host.beats import WorkerStatus
from shoal_client.liveness.beat_board import BeatBoard
from shoal_client.local.process import KILLED_S


class WorkerTermination:
    """Decides when remaining workers are to end, and ends them."""

    def __init__(
        self, slots: Sequence[WorkerSlot], *, job: str, grace_s: float, say: Callable[[str], None]
    ) -> None:
        self._slots, self._job, self._grace_s, self._say = slots, job, grace_s, say
        self.were_signalled = False
        self._over_s = self._kill_s = self._leave_s = math.inf

    @property
    def next_s(self) -> float:
        """The time (monotonic) of the next work of `kill_overdue` or `left_behind`; infinity:
        none."""
        return min(self._over_s, self._kill_s, self._leave_s)

    @property
    def running(self) -> list[WorkerSlot]:
        return [slot for slot in self._slots if slot.process is not None]

    def order_stop(self) -> None:
        """Ask all workers to end within the grace time. A repeated order changes nothing."""
        if self.were_signalled:
            return
        self.were_signalled = True
        self._kill_s = time.monotonic() + self._grace_s
        for slot in self.running:
            self._ask(slot)

    def _ask(self, slot: WorkerSlot) -> None:
        """Ask a worker's process to end, once: a second SIGTERM ends a worker that drains."""
        assert slot.process is not None
        if slot.asked is not slot.process:
            slot.asked = slot.process
            # Not a SIGINT: each script would end within its step.
            slot.process.terminate()

    def kill(self, slots: Sequence[WorkerSlot]) -> None:
        if not slots:
            return
        self._say(f"killing {len(slots)} worker{'' if len(slots) == 1 else 's'}")
        now_s = time.monotonic()
        self._leave_s = now_s + KILLED_S
        for slot in slots:
            assert slot.process is not None
            if slot.killed_s is None:
                slot.killed_s = now_s
            slot.process.kill()

    def kill_if_lost(self, status: WorkerStatus) -> None:
        """Kill a worker that was declared lost, if it is halted or outlives the grace time."""
        slot = next((s for s in self.running if s.pid == status.pid), None)
        if slot is None or not status.lost_incarnation or slot.killed_s is not None:
            return
        now_s = time.monotonic()
        if slot.lost_incarnation != status.lost_incarnation:
            slot.lost_incarnation, slot.lost_s = status.lost_incarnation, now_s
        # A running worker learns of the loss, and ends by itself.
        if slot.halted or now_s >= slot.lost_s + self._grace_s:
            how = "while it was halted" if slot.halted else "and does not end"
            self._say(f"{slot.member_id} was declared lost {how}")
            self.kill([slot])

    def kill_overdue(self, over: str, board: BeatBoard) -> None:
        """Kill workers whose grace time is over. `over`: the ended job's phase, or empty."""
        now_s = time.monotonic()
        if not over:
            self._over_s = math.inf
        elif self._over_s == math.inf:
            self._over_s = now_s + self._grace_s
            if over == "stopped":
                self._end_starting(board)
        elif now_s >= self._over_s:
            self._over_s = now_s + self._grace_s
            if stuck := [slot for slot in self.running if self._is_stuck(slot, over, board)]:
                names = ", ".join(slot.member_id for slot in stuck)
                self._say(f"job {self._job} is {over}, and {names} did not end")
                self.kill(stuck)
        if now_s >= self._kill_s:
            self._kill_s = math.inf
            self.kill(self.running)

    def _end_starting(self, board: BeatBoard) -> None:
        """Ask workers that have not joined to end: an operator may retry the stopped job."""
        for slot in self.running:
            if not board.slots[slot.index].was_claimed:
                self._say(f"job {self._job} is stopped: ending {slot.member_id}, which starts")
                self._ask(slot)

    def _is_stuck(self, slot: WorkerSlot, over: str, board: BeatBoard) -> bool:
        """True if a worker of an ended job is to be killed; not for a script that has left a
        finished job."""
        if over != "finished" or slot.halted:
            return True
        beat_slot = board.slots[slot.index]
        claim = beat_slot.newest_claim
        has_another = claim is not None and claim.token.job != self._job
        return not has_another and not beat_slot.has_left

    def left_behind(self, *, ends: bool) -> Iterator[WorkerSlot]:
        """Yield workers that did not end within KILLED_S of being killed, once the run `ends`."""
        now_s = time.monotonic()
        if now_s >= self._leave_s:
            self._leave_s = math.inf
        for slot in self.running if ends else ():
            if slot.killed_s is not None and now_s >= slot.killed_s + KILLED_S:
                self._say(
                    f"{slot.member_id} (pid {slot.pid}) hangs in the kernel and does not end on"
                    " SIGKILL: it is abandoned"
                )
                yield slot
