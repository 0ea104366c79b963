"""Copies in host memory: what peers keep, and what is left after the loss of a rank."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from operator import gt, sub
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.collectives import copies_bodies
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.backends.in_memory.run import run_in_memory
from shoal.state.peer_copies import interval_of, targets_of


@pytest.mark.parametrize("num_copies", [1, 2])
def test_each_rank_keeps_the_last_two_steps_of_itself_and_of_the_ranks_before(
    num_copies: int,
) -> None:
    """Copies are equal bit for bit, though training goes on at once, and use the same memory again
    and again. State that every rank has is not copied. Each rank knows the names of tensors that
    only others hold."""
    for seen in run_on_gloo(3, copies_bodies.offer_steps, num_copies):
        assert seen["wrong"] == []
        assert seen["memory is used again"]
        assert len(set(seen["bytes"])) == 1
        # Each piece begins at a multiple of 64 bytes: 6 tensors, 1 or 2 peers, 2 steps.
        assert 0 <= seen["bytes"][0] - seen["held"] < 64 * 6 * (1 + num_copies) * 2
        assert seen["due"] == [0, 2, 4, 6]


hosts_of_ranks = st.lists(st.sampled_from("abcde"), min_size=1, max_size=24)


@given(hosts_of_ranks, st.integers(0, 3))
def test_copies_are_on_other_hosts_if_that_is_possible(hosts: list[str], copies: int) -> None:
    """Ranks of a host are usually neighbours, and are lost together. Each rank receives as many
    copies as it sends."""
    found = targets_of(hosts, copies)
    num_copies = min(copies, len(hosts) - 1)
    given: Counter[int] = Counter()
    for rank, targets in enumerate(found):
        assert rank not in targets
        assert len(set(targets)) == len(targets) == num_copies
        given.update(targets)
    assert all(given[rank] == num_copies for rank in range(len(hosts)))
    if num_copies:
        largest = max(Counter(hosts).values())
        apart = sum(hosts[targets[0]] != hosts[rank] for rank, targets in enumerate(found))
        # If a host has more than half of the ranks, only so many of its ranks find a rank
        # elsewhere.
        possible = min(len(hosts), 2 * (len(hosts) - largest))
        assert apart == possible if copies == 1 else apart >= possible


@pytest.mark.parametrize(
    ("hosts", "own_hosts", "repeated"),
    [("AAABBCC", 0, 2), ("AAAABBCCDD", 0, 2), ("AABBCC", 0, 0), ("AABB", 0, 4)],
)
def test_second_copies_go_to_hosts_without_a_copy_if_possible(
    hosts: str, own_hosts: int, repeated: int
) -> None:
    """A second copy for which there is no such host goes to another host than the rank's own."""
    assert misplaced(hosts, targets_of(hosts, 2)) == (own_hosts, repeated)


def test_two_copies_are_on_different_hosts_whenever_they_can_be() -> None:
    """Compared with all assignments, for all numbers of ranks per host of up to seven ranks."""
    for sizes in (each for world_size in range(3, 8) for each in divided(world_size, world_size)):
        hosts = "".join(name * size for name, size in zip("ABCDEFG", sizes, strict=False))
        assert misplaced(hosts, targets_of(hosts, 2)) == least_misplaced(sizes, 2), hosts


def test_all_copies_of_a_rank_are_on_different_hosts_whenever_all_ranks_can_have_that() -> None:
    """A host with more than one in `copies` + 1 ranks makes that impossible, and nothing else."""
    for sizes in (each for world_size in range(2, 9) for each in divided(world_size, world_size)):
        hosts = "".join(name * size for name, size in zip("ABCDEFGH", sizes, strict=False))
        for copies in range(1, len(hosts)):
            is_apart = misplaced(hosts, targets_of(hosts, copies)) == (0, 0)
            assert is_apart == (max(sizes) * (copies + 1) <= len(hosts)), hosts


def misplaced(hosts: str, found: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Number of copies on their senders' own hosts, and of those on another host twice."""
    own = repeated = 0
    for rank, targets in enumerate(found):
        others = [hosts[each] for each in targets if hosts[each] != hosts[rank]]
        own += len(targets) - len(others)
        repeated += len(others) - len(set(others))
    return own, repeated


def divided(num_ranks: int, largest: int) -> Iterator[list[int]]:
    """All ways to divide ranks over hosts, as the hosts' sizes from the largest down."""
    if not num_ranks:
        yield []
    for size in range(min(num_ranks, largest), 0, -1):
        for others in divided(num_ranks - size, size):
            yield [size, *others]


def least_misplaced(sizes: Sequence[int], copies: int) -> tuple[int, int]:
    """The least `misplaced` of all assignments in which each rank receives `copies` copies."""
    senders = [host for host, size in enumerate(sizes) for _ in range(size)]
    choices = [n for n in product(range(copies + 1), repeat=len(sizes)) if sum(n) == copies]

    @cache
    def least(sender: int, free: tuple[int, ...]) -> tuple[int, int]:
        if sender == len(senders):
            return 0, 0
        own, found = senders[sender], (len(senders) * copies, 0)
        limits = [min(free[host], size - (host == own)) for host, size in enumerate(sizes)]
        for numbers in choices:
            if any(map(gt, numbers, limits)):
                continue
            rest = least(sender + 1, tuple(map(sub, free, numbers)))
            repeated = sum(max(0, n - 1) for host, n in enumerate(numbers) if host != own)
            found = min(found, (rest[0] + numbers[own], rest[1] + repeated))
        return found

    return least(0, tuple(copies * size for size in sizes))


def test_on_hosts_of_eight_the_loss_of_one_leaves_a_copy_of_all() -> None:
    hosts = [f"host-{rank // 8}" for rank in range(32)]
    for rank, targets in enumerate(targets_of(hosts, 1)):
        assert targets == [(rank + 8) % 32]
    assert targets_of(["one"] * 4, 1) == [[1], [2], [3], [0]]


@pytest.mark.parametrize(
    ("copy_in_steps", "interval"),
    [(0.0, 1), (0.05, 1), (0.06, 2), (0.18, 4), (0.5, 10), (0.51, 10), (math.inf, 10)],
)
def test_copies_take_a_twentieth_of_the_time_at_most(copy_in_steps: float, interval: int) -> None:
    assert interval_of(copy_in_steps) == interval


@pytest.mark.parametrize(
    ("copy_s", "made"),
    [
        ((0.04, 0.04), [0, 2, 4, 5, 6, 7, 8, 9, 10]),
        ((0.04, 0.18), [0, 2, 4, 8]),
        ((2.0, 0.01), [0, 2, 4]),
    ],
)
def test_ranks_copy_as_often_as_the_slowest_may(copy_s: tuple[float, ...], made: list[int]) -> None:
    for seen in run_on_gloo(2, copies_bodies.due_steps, copy_s, 10):
        assert seen == made


def test_copies_are_kept_over_ranks_that_are_threads_too() -> None:
    """Threads form the group of a notebook."""
    for seen in run_in_memory(copies_bodies.offer_steps, 3, 2):
        assert seen["wrong"] == []


def test_a_generations_copies_remain_until_the_next_has_a_complete_one() -> None:
    """Holds over a generation that made no copy. A rank that is alone needs none."""
    for seen in run_on_gloo(2, copies_bodies.over_generations):
        assert seen == {
            "before its first copy": [4, 5],
            "after one without any": [4, 5],
            "after its first copy": [6],
            "alone": [6],
            "due alone": False,
            "alone and going on": [],
            "offered after its end": "GenerationBroken",
        }


def test_copies_that_may_be_complete_on_all_ranks_outlive_short_generations() -> None:
    """A rank does not know which copies the others have discarded for it; and no more is kept than
    can be needed."""
    for seen in run_on_gloo(2, copies_bodies.interrupted_generations):
        assert seen == [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6], [3, 5, 6, 7]]


def test_ranks_that_copy_different_steps_get_an_error() -> None:
    """Copies of different steps are useless together."""
    first, second = run_on_gloo(2, copies_bodies.different_steps)
    assert first.startswith("InternalError")
    assert "step 6 on rank 1" in first
    assert "step 5 on rank 0" in second


@pytest.mark.parametrize("stops", [False, True])
def test_a_rank_lost_in_the_midst_of_a_copy_leaves_the_step_before(
    tmp_path: Path, stops: bool
) -> None:
    """Half a copy never shows; the two survivors hold a whole step and continue from it."""
    gates = [gate(tmp_path / f"gate{rank}") for rank in range(3)]
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [
            ranks.start(copies_bodies.lose_a_rank, path, rank, gates[rank], stops)
            for rank in range(3)
        ]
        crew[1].expect("failing")
        for rank in (0, 2):
            Path(gates[rank]).write_bytes(b"")
        for rank in (0, 2):
            assert crew[rank].expect("failed") == {"recognised": True}
            seen = crew[rank].expect("recovered")
            assert (seen["wrong"], seen["halves"]) == ("", 0)
        # Only rank 2 was to have the copy of rank 1.
        assert seen["copies_of_4"] == 0


def test_closing_copies_waits_for_no_peer(tmp_path: Path) -> None:
    """A stopped peer delays nothing either: a member that waits for a copy is freed, and the thread
    ends when the group is cut."""
    opened = gate(tmp_path / "gate")
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [
            ranks.start(copies_bodies.close_beside_a_stopped_peer, path, rank, opened)
            for rank in range(2)
        ]
        crew[1].expect("failing")
        Path(opened).write_bytes(b"")
        assert "have ended" in crew[0].expect("freed")["reason"]
        assert crew[0].expect("closed") == {"steps": [3]}
        assert crew[0].expect("thread") == {"alive": False}


def gate(path: Path) -> str:
    """Make a named pipe: its reader waits until the test has opened it too."""
    os.mkfifo(path)
    return str(path)
