"""Ends of workers that do not end by themselves."""

from typing import cast

import pytest

from shoal.launcher import worker_termination
from shoal.launcher.worker_slots import WorkerSlot
from shoal.launcher.worker_termination import WorkerTermination
from shoal_client.host.beats import WorkerStatus
from shoal_client.liveness.beat_board import BeatBoard
from shoal_client.local.process import Process


class HangingProcess:
    """A process that hangs in the kernel: no signal ends it."""

    pid = 7

    def __init__(self) -> None:
        self.num_asked = 0

    def terminate(self) -> None:
        """Record a SIGTERM."""
        self.num_asked += 1

    def kill(self) -> None:
        """Do nothing."""


@pytest.fixture
def process() -> HangingProcess:
    return HangingProcess()


@pytest.fixture
def slot(process: HangingProcess) -> WorkerSlot:
    return WorkerSlot(index=0, member_id="vm-0", process=cast(Process, process))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def termination(slot: WorkerSlot, said: list[str]) -> WorkerTermination:
    return WorkerTermination([slot], job="j", grace_s=5.0, say=said.append)


def test_a_worker_that_hangs_is_abandoned_as_soon_as_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
    termination: WorkerTermination,
    slot: WorkerSlot,
    said: list[str],
) -> None:
    """The time to abandon it had come earlier, when the run did not end yet: no other kill, and no
    other grace time, comes first."""
    monkeypatch.setattr(worker_termination, "KILLED_S", 0.0)
    termination.kill([slot])
    assert list(termination.left_behind(ends=False)) == []
    assert termination.next_s == float("inf")
    assert list(termination.left_behind(ends=True)) == [slot]
    assert said[-1].startswith("vm-0 (pid 7) hangs in the kernel")


def test_a_killed_worker_has_time_to_end(termination: WorkerTermination, slot: WorkerSlot) -> None:
    termination.kill([slot])
    assert list(termination.left_behind(ends=True)) == []
    assert termination.next_s < float("inf")


def test_two_orders_to_stop_are_one_signal_for_a_worker(
    termination: WorkerTermination, process: HangingProcess
) -> None:
    """The run's cluster is given up, and then comes a Ctrl-C: a second SIGTERM would end the worker
    while it drains. Nor does the worker get more time."""
    termination.order_stop()
    until_s = termination.next_s
    termination.order_stop()
    assert process.num_asked == 1
    assert termination.next_s == until_s


def test_a_worker_of_a_stopped_job_is_asked_once(
    termination: WorkerTermination, process: HangingProcess
) -> None:
    """A worker that had not joined its stopped job is asked to end; Ctrl-C asks all workers."""
    with BeatBoard(1) as board:
        termination.kill_overdue("stopped", board)
    assert process.num_asked == 1
    termination.order_stop()
    assert process.num_asked == 1


def test_a_worker_that_joined_again_has_the_whole_grace_time_at_its_next_loss(
    monkeypatch: pytest.MonkeyPatch,
    termination: WorkerTermination,
    slot: WorkerSlot,
    said: list[str],
) -> None:
    """A process that joins again claims another incarnation."""
    times_s = iter([1.0, 100.0, 104.0, 105.0, 105.0])
    monkeypatch.setattr(worker_termination.time, "monotonic", lambda: next(times_s))
    for incarnation in ("first", "second", "second", "second"):
        assert slot.killed_s is None
        status = WorkerStatus(pid=7, job="j", phase="running", lost_incarnation=incarnation)
        termination.kill_if_lost(status)
    assert slot.killed_s == 105.0
    assert said[0] == "vm-0 was declared lost and does not end"
