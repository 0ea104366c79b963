"""Ranks that share memory keep off each other's processors, and go where the user lets them."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.backends.shared_memory.processors import Processors

ALLOWED = sorted(os.sched_getaffinity(0))[:2]
OWN, OTHER = 0, 1
Seen = tuple[int, set[int]]

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor")


def beside_another(taken: int, let_go: bool = True, num_times: int = 1) -> Seen:
    """A rank comes to run where another one has noted itself, so often: where it is by its own
    note, and where it may run by then. `let_go`: it may run on both of `ALLOWED`, and not only
    there."""

    def run() -> Seen:
        notes = memoryview(bytearray(16)).cast("Q")
        processors = Processors(notes, OWN)
        for _ in range(num_times):
            os.sched_setaffinity(0, {taken})
            os.sched_setaffinity(0, set(ALLOWED) if let_go else {taken})
            notes[OTHER] = taken + 1
            processors.part()
        return notes[OWN] - 1, os.sched_getaffinity(0)

    return in_a_thread(run)


def in_a_thread(run: Callable[[], Seen]) -> Seen:
    """Whose processors are its own affair."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result()


@pytest.mark.parametrize("taken", ALLOWED)
def test_a_rank_that_finds_another_on_its_processor_goes_elsewhere(taken: int) -> None:
    (left,) = set(ALLOWED) - {taken}
    assert beside_another(taken, num_times=3) == (left, set(ALLOWED))


def test_a_rank_that_the_user_holds_to_a_processor_stays_there() -> None:
    assert beside_another(ALLOWED[0], let_go=False) == (ALLOWED[0], {ALLOWED[0]})


def test_a_rank_that_may_not_move_itself_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a sandbox that forbids it."""
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
            processors.part()
        return notes[OWN] - 1, os.sched_getaffinity(0)

    assert in_a_thread(run)[1] == set(ALLOWED)
    assert asked[1:] == [set(ALLOWED)], "asked once, to move and to come back"
