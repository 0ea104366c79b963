"""A trainer whose group was cut is released from any wait, at any time."""

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from structlog.testing import capture_logs
from support.collectives.strategy_runs import generation_of

from shoal.backends.abortable.waiter import AbortableWaiter
from shoal.backends.process_group.interface import Seat
from shoal.membership.generation import Context
from shoal.strategies.synchronous import generation_group
from shoal.strategies.synchronous.generation_group import GenerationGroup
from shoal.torch_private.c10d import Store
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2 import Limits


class DeafBackend:
    """A backend whose groups do not end running operations when they are cut, as Gloo's may not."""

    name = "deaf"
    is_watched = True

    def __init__(self) -> None:
        self.kept = 0

    def group(self, seat: Seat, store: Store) -> "DeafBackend":
        return self

    def open(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.ProcessGroup(0, 2)
        return group

    def cut(self, reason: str) -> None:
        """Ends nothing."""

    def check(self) -> None:
        """See `Group`."""

    def retire(self) -> None:
        """See `Group`."""

    def keep_for_ever(self) -> None:
        self.kept += 1

    def is_failure(self, error: BaseException) -> bool:
        return False


class Cut:
    """A generation that is over, with an open group."""

    def __init__(self) -> None:
        self.backend, self.group = DeafBackend(), GenerationGroup()
        context = Context(job="job", coordinators=[], token=Token, limits=Limits())
        group = self.group.connect(self.backend, generation_of(["m0", "m1"], "m0"), context)
        self.opened = self.group.open(group)
        self.group.cut(1)

    def wait(self) -> None:
        """Wait in a collective that never ends."""
        waiter = AbortableWaiter(self.opened)
        assert "did not end" in waiter.new_completion().wait()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(generation_group, "STUCK_AFTER_S", 0.05)
    monkeypatch.setattr(generation_group, "WARNED_AFTER_S", 0.1)
    yield


def freeing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "shoal-free-trainer"]


def test_a_trainer_that_comes_late_to_a_group_that_is_cut_is_freed() -> None:
    """The trainer was in the script's own code when the others were released; later it waits
    again."""
    cut = Cut()
    for _ in range(3):
        cut.wait()
    assert cut.backend.kept == 3
    thread, *others = freeing()
    assert not others
    cut.group.cut(1)  # by another thread that has learned of it
    assert freeing() == [thread]
    cut.group.release()
    thread.join(10)
    assert not freeing()


def test_a_trainer_that_does_not_stop_is_logged_with_its_stack() -> None:
    """The line shows where the trainer is, for the analysis of its expulsion because of a hang."""
    with capture_logs() as logs:
        cut = Cut()
        (thread,) = freeing()
        while len(logs) < 4:
            cut.wait()  # stands for code that does not return
        cut.group.release()
        thread.join(10)
    (line,) = [each for each in logs if each["event"] == "trainer_has_not_stopped"]
    assert "in test_a_trainer_that_does_not_stop" in line["stack"]
    assert line["waited_s"] > 0
