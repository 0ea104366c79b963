"""Ranks that share memory avoid each other's processors, within the processors that the user
allows."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.backends.shared_memory import processors
from shoal.backends.shared_memory.processors import Processors

ALLOWED = sorted(os.sched_getaffinity(0))[:2]
OWN, OTHER = 0, 1
Seen = tuple[int, set[int]]

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")


def beside_another(taken: int, release: bool = True, num_times: int = 1) -> Seen:
    """Run a rank on processor `taken`, which another rank has noted as its own, `num_times` times.
    Returns the processor that the rank notes for itself, and those on which it may run afterwards.
    `release`: the rank may run on both of `ALLOWED`, not only on `taken`."""

    def run() -> Seen:
        notes = memoryview(bytearray(16)).cast("Q")
        processors = Processors(notes, OWN)
        for _ in range(num_times):
            os.sched_setaffinity(0, {taken})
            os.sched_setaffinity(0, set(ALLOWED) if release else {taken})
            notes[OTHER] = taken + 1
            processors.avoid_shared_processor()
        return notes[OWN] - 1, os.sched_getaffinity(0)

    return in_a_thread(run)


def in_a_thread(run: Callable[[], Seen]) -> Seen:
    """Call `run` in a new thread, so that the affinity of the test's thread stays as it is."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


@pytest.mark.parametrize("taken", ALLOWED)
def test_a_rank_that_finds_another_on_its_processor_moves_to_a_free_one(taken: int) -> None:
    (left,) = set(ALLOWED) - {taken}
    assert beside_another(taken, num_times=3) == (left, set(ALLOWED))


def test_a_rank_that_the_user_binds_to_a_processor_stays_on_it() -> None:
    assert beside_another(ALLOWED[0], release=False) == (ALLOWED[0], {ALLOWED[0]})


def test_a_rank_that_may_not_move_itself_tries_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sandbox may forbid to set the affinity."""
    asked: list[set[int]] = []

    def refuse(_: int, mask: set[int]) -> None:
        asked.append(mask)
        raise PermissionError("Operation not permitted")

    def run() -> Seen:
        os.sched_setaffinity(0, set(ALLOWED))
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
        notes = memoryview(bytearray(16)).cast("Q")
        processors = Processors(notes, OWN)
        for number in ALLOWED * 3:
            notes[OTHER] = number + 1
            processors.avoid_shared_processor()
        return notes[OWN] - 1, os.sched_getaffinity(0)

    assert in_a_thread(run)[1] == set(ALLOWED)
    assert len(asked) == 1, "and does not ask again"


class Interrupt(Exception):
    """An exception raised by a script's signal handler."""


class Kernel:
    """Model of the processors on which Linux (6.2 or newer) lets a thread run: those requested for
    it, as far as they are in its cpuset. The request is kept when the cpuset changes."""

    def __init__(self, cpuset: Iterable[int], asked: set[int] | None = None) -> None:
        self.cpuset = set(cpuset)
        self.interrupts = False
        self._asked = asked

    def allowed(self, _: int = 0) -> set[int]:
        return self.cpuset & (self.cpuset if self._asked is None else self._asked)

    def hold(self, _: int, mask: set[int]) -> None:
        if not self.cpuset & set(mask):
            raise OSError("Invalid argument")
        self._asked = set(mask)
        if self.interrupts:
            self.interrupts = False
            raise Interrupt

    def release(self, thread: int, mask_bytes: int, mask: bytes) -> int:
        assert mask == b"\xff" * mask_bytes
        self._asked = None
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel in which the thread's cpuset has two processors."""
    return installed(Kernel(ALLOWED), monkeypatch)


def installed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(os, "sched_getaffinity", kernel.allowed)
    monkeypatch.setattr(os, "sched_setaffinity", kernel.hold)
    monkeypatch.setattr(processors.libc, "sched_setaffinity", kernel.release)
    monkeypatch.setattr(processors.libc, "sched_getcpu", lambda: ALLOWED[0])
    return kernel


def crowded() -> Processors:
    """Processors of a rank that finds another rank on the processor on which it runs."""
    notes = memoryview(bytearray(16)).cast("Q")
    notes[OTHER] = ALLOWED[0] + 1
    return Processors(notes, OWN)


def test_a_moved_rank_may_use_processors_that_its_cpuset_gets_later(kernel: Kernel) -> None:
    """A cpuset grows with `docker update --cpuset-cpus`, or when a pod with processors of its own
    has ended."""
    crowded().avoid_shared_processor()
    kernel.cpuset |= {1000, 1001}
    assert kernel.allowed() == {*ALLOWED, 1000, 1001}


def test_a_rank_that_the_user_binds_to_some_processors_of_a_cpuset_stays_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = installed(Kernel([*ALLOWED, 1000], asked=set(ALLOWED)), monkeypatch)
    crowded().avoid_shared_processor()
    kernel.cpuset |= {1001}
    assert kernel.allowed() == set(ALLOWED)


def test_an_error_during_a_move_does_not_bind_a_rank_to_a_processor(kernel: Kernel) -> None:
    """Signal handlers run between any two calls of the main thread."""
    kernel.interrupts = True
    with pytest.raises(Interrupt):
        crowded().avoid_shared_processor()
    assert kernel.allowed() == set(ALLOWED)
