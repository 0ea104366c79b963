"""The keeper restarts a part of a cluster after growing pauses, and gives it up after some
failures."""

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from shoal_client.local import keeper
from shoal_client.local.keeper import Keeper, NotStarted, RestartPolicy
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_proto.errors import InvalidSpec, Unavailable

DEADLINE_S = 30.0
SLEEPS = "import signal; signal.pause()"
AT_ONCE = RestartPolicy(max_failures=3, settled_s=3600.0, first_pause_s=0.001)
SETTLED_AT_ONCE = RestartPolicy(max_failures=3, settled_s=0.0, first_pause_s=0.001)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor(grace_s=0.1) as supervisor:
        yield supervisor


class Part:
    """A process that sleeps, and its keeper's reactions to its ends. `first`: the program of the
    first process."""

    def __init__(self, supervisor: Supervisor, policy: RestartPolicy, first: str = SLEEPS) -> None:
        self._supervisor = supervisor
        self.says: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.given_up: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.failures: list[int] = []
        self.comes_up = True
        self.reporting_fails = False
        self.starts: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Number of earlier starts, at each start that succeeded."""
        self.waits_for_etcd = 0
        """Number of starts that first end with EX_TEMPFAIL."""
        self.process = self._spawn(first)
        self.keeper = Keeper(
            self.process,
            self._start,
            policy,
            say=self._say,
            give_up=lambda name, reason: self.given_up.put((name, reason)),
        )

    def _spawn(self, program: str = SLEEPS) -> Process:
        arguments = (sys.executable, "-c", program)
        return self._supervisor.spawn(ChildCommand(name="part", arguments=arguments))

    def _start(self, failures: int) -> Process:
        self.failures.append(failures)
        if self.waits_for_etcd > 0:
            self.waits_for_etcd -= 1
            code = os.EX_TEMPFAIL
            raise NotStarted("part did not come up", seen="no etcd", fix="", exit_code=code)
        if not self.comes_up:
            raise Unavailable("part did not come up", seen="a taken port")
        self.process = self._spawn()
        self.starts.put(len(self.failures) - 1)
        return self.process

    def _say(self, text: str) -> None:
        self.says.put(text)
        if self.reporting_fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.keeper.release()
        self.process.kill()
        self.keeper.join()


def test_a_part_that_ends_is_started_again(supervisor: Supervisor) -> None:
    """One line reports the end, and another that the part serves again."""
    part = Part(supervisor, SETTLED_AT_ONCE)
    for _ in range(4):
        part.kill()
        assert part.says.get(timeout=DEADLINE_S) == "part was killed by SIGKILL; starting it again"
        assert part.says.get(timeout=DEADLINE_S) == "part serves again"
    # The part had settled before each end, so that no failure was the second in a row.
    assert part.failures == [1] * 4
    part.end()
    assert part.given_up.empty()


def test_a_part_is_started_again_though_its_end_cannot_be_reported(
    supervisor: Supervisor,
) -> None:
    """The disk with the messages is full."""
    part = Part(supervisor, SETTLED_AT_ONCE)
    part.reporting_fails = True
    for failures in range(2):
        part.kill()
        assert part.starts.get(timeout=DEADLINE_S) == failures
    part.end()


def test_a_part_that_does_not_stay_up_is_given_up(supervisor: Supervisor) -> None:
    """A part is given up after the third end in a row without a settled time in between."""
    part = Part(supervisor, AT_ONCE)
    for _ in range(2):
        part.kill()
        assert "starting it again" in part.says.get(timeout=DEADLINE_S)
        assert part.says.get(timeout=DEADLINE_S) == "part serves again"
    part.kill()
    name, reason = part.given_up.get(timeout=DEADLINE_S)
    assert (name, part.failures) == ("part", [1, 2])
    assert "was killed by SIGKILL, as the last of 3 ends in a row" in reason
    part.keeper.join()


def test_a_part_that_does_not_start_is_given_up(supervisor: Supervisor) -> None:
    """A failed start counts as an end."""
    part = Part(supervisor, AT_ONCE)
    part.comes_up = False
    part.kill()
    _, reason = part.given_up.get(timeout=DEADLINE_S)
    assert "did not come up again (a taken port), as the last of 3" in reason
    assert part.failures == [1, 2]


def test_starts_that_fail_for_lack_of_etcd_are_repeated_without_limit(
    supervisor: Supervisor,
) -> None:
    """Starts that fail because etcd does not answer do not count towards the limit of failures, and
    are reported once."""
    part = Part(supervisor, AT_ONCE)
    part.waits_for_etcd = 20
    part.kill()
    events = [part.says.get(timeout=DEADLINE_S) for _ in range(3)]
    assert events == [
        "part was killed by SIGKILL; starting it again",
        "part did not come up again (no etcd); starting it again",
        "part serves again",
    ]
    # A failure of the part itself counts as before.
    part.comes_up = False
    part.kill()
    _, reason = part.given_up.get(timeout=DEADLINE_S)
    assert "did not come up again (a taken port), as the last of 3" in reason
    part.keeper.join()


def test_an_end_for_want_of_etcd_gives_up_no_part_that_may_fail_only_once(
    supervisor: Supervisor,
) -> None:
    """An end for lack of etcd does not count as the one failure that the policy allows, and neither
    do failed starts after it."""
    policy = RestartPolicy(max_failures=1, settled_s=3600.0, first_pause_s=0.001)
    part = Part(supervisor, policy, first=f"raise SystemExit({os.EX_TEMPFAIL})")
    part.waits_for_etcd = 2
    events = [part.says.get(timeout=DEADLINE_S) for _ in range(3)]
    assert events[-1] == "part serves again"
    part.end()
    assert part.given_up.empty()


def test_a_released_part_is_not_started_again(supervisor: Supervisor) -> None:
    """The keeper of a released part ends with the part, and reports nothing."""
    part = Part(supervisor, AT_ONCE)
    part.end()
    assert part.failures == []
    assert part.says.empty()


def test_a_part_that_hangs_in_the_kernel_is_not_waited_for(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL does not end the part within its time."""
    part = Part(supervisor, AT_ONCE)
    monkeypatch.setattr(keeper, "KILLED_S", 0.05)
    part.keeper.release()
    joining = threading.Thread(target=part.keeper.join, daemon=True)
    joining.start()
    joining.join(DEADLINE_S / 10)
    assert not joining.is_alive()
    part.end()


def test_pauses_double_until_the_part_is_given_up() -> None:
    """A part is given up instead of the restart after the longest pause."""
    policy = RestartPolicy()
    pauses_s = [policy.pause_s(failures) for failures in range(1, policy.max_failures)]
    assert pauses_s == [0.1, 0.2, 0.4, 0.8]


def test_a_bad_policy_is_refused() -> None:
    """The policy is checked when it is made."""
    with pytest.raises(InvalidSpec):
        RestartPolicy(max_failures=0)
