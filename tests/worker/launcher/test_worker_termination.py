"""Ends of workers that do not end by themselves."""

from typing import cast

import pytest

from shoal.launcher import worker_termination
from shoal.launcher.worker_slots import WorkerSlot
from shoal.launcher.worker_termination import WorkerTermination
from shoal_client.local.process import Process


class HangingProcess:
    """A process that hangs in the kernel: no signal ends it."""

    pid = 7

    def kill(self) -> None:
        """Do nothing."""


@pytest.fixture
def slot() -> WorkerSlot:
    return WorkerSlot(index=0, member_id="vm-0", process=cast(Process, HangingProcess()))


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
