"""Copies in host memory: what peers keep, and what is left after the loss of a rank."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from operator import gt, sub
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.collectives import copies_bodies
from support.collectives.state_bodies import difference
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.backends.in_memory.run import run_in_memory
from shoal.state import peer_copies
from shoal.state.inventory import Inventory
from shoal.state.peer_copies import Catalogue, PeerCopies, interval_of, targets_of
from shoal.state.shards import Chunk, StateShard, TensorShard


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


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def state_of(step: int, rank: int, shapes: Shapes, **values: Any) -> StateShard:
    """Return the half of each of these tensors that a rank of two holds: columns after step 9, else
    rows. Each element depends on name, step and rank."""
    shards = {}
    for number, (name, (shape, dtype)) in enumerate(shapes.items()):
        dimension = 1 if step > 9 else 0
        sizes, offsets = list(shape), [0] * len(shape)
        sizes[dimension] //= 2
        offsets[dimension] = rank * sizes[dimension]
        chunk = Chunk(offsets=tuple(offsets), sizes=tuple(sizes))
        tensor = torch.arange(math.prod(sizes)).view(sizes) + 7 * step + 3 * rank + number
        shards[name] = TensorShard(shape=shape, chunk=chunk, tensor=tensor.to(dtype))
    return StateShard(step=step, shards=shards, values=values)


def is_held(copies: PeerCopies, expected: Sequence[StateShard]) -> bool:
    """True if exactly these state shards are held of their step."""
    held = [each for each in copies.held() if each.step == expected[0].step]
    return len(held) == len(expected) and all(
        not difference(ours, wanted) and repr(ours.values) == repr(wanted.values)
        for ours, wanted in zip(held, expected, strict=True)
    )


W, M, V = "model.w", "optim.w/m", "optim.w/v"
SMALL: Shapes = {W: ((4, 6), torch.float32), M: ((4, 6), torch.float32)}


def copied_steps(states: Sequence[tuple[int, Shapes, dict[str, Any]]]) -> list[bool]:
    """Copy one state after another. Returns, for each, True if this rank then holds its own and its
    peer's half, and still those of the state before."""
    rank = dist.get_rank()
    copies = PeerCopies(dist.new_group(), copies=1, every_steps=1)
    right, before = [], None
    for step, shapes, values in states:
        copies.offer(state_of(step, rank, shapes, **values))
        copies.flush()
        now = [state_of(step, each, shapes, **values) for each in (rank, 1 - rank)]
        right.append(is_held(copies, now) and (before is None or is_held(copies, before)))
        before = now
    copies.close()
    return right


@pytest.mark.parametrize(
    "shapes",
    [
        {**SMALL, V: ((4, 6), torch.float32)},
        {W: SMALL[W]},
        {W: SMALL[W], V: SMALL[M]},
        {**SMALL, M: ((4, 6), torch.float64)},
        {**SMALL, M: ((4, 6), torch.int32)},
        {**SMALL, M: ((2, 12), torch.float32)},
        {M: SMALL[M], W: SMALL[W]},
    ],
    ids=["gained", "lost", "renamed", "wider", "as wide", "other shape", "other order"],
)
def test_a_copy_has_the_tensors_of_its_own_step(shapes: Shapes) -> None:
    """Buffers are arranged once for all steps with the same tensors, and anew for others, also if
    these take as many bytes. A copy of other tensors leaves the copy before it intact."""
    states = [(1, SMALL, {}), (2, SMALL, {}), (3, shapes, {}), (4, shapes, {}), (5, SMALL, {})]
    assert run_in_memory(copied_steps, 2, states) == [[True] * 5] * 2


def test_a_copy_has_the_chunks_of_its_own_step() -> None:
    states = [(8, SMALL, {}), (9, SMALL, {}), (10, SMALL, {}), (11, SMALL, {})]
    assert run_in_memory(copied_steps, 2, states) == [[True] * 4] * 2


def test_a_copy_has_the_values_of_its_own_step() -> None:
    """Only values that have changed are sent: 1, 1.0 and True are equal, but not the same."""
    values = [{"lr": 1}, {"lr": 1}, {"lr": 1.0}, {"lr": True}, {"lr": -0.0}, {"lr": 0.0}, {}]
    states = [(step, SMALL, each) for step, each in enumerate(values, start=1)]
    assert run_in_memory(copied_steps, 2, states) == [[True] * len(values)] * 2


def test_the_next_generation_copies_its_own_chunks() -> None:
    """Names are the same, but each member holds another half; the last copies of the generation
    before stay as they were."""

    def body() -> list[bool]:
        rank = dist.get_rank()
        first = PeerCopies(dist.new_group(), copies=1, every_steps=1)
        for step in (1, 2):
            first.offer(state_of(step, rank, SMALL))
            first.flush()
        first.close()
        second = PeerCopies(dist.new_group(), copies=1, every_steps=1, before=first)
        inherited = [state_of(2, each, SMALL) for each in (rank, 1 - rank)]
        right = [is_held(second, inherited)]
        for step in (3, 4):
            second.offer(state_of(step, 1 - rank, SMALL))
            second.flush()
            right.append(
                is_held(second, [state_of(step, each, SMALL) for each in (1 - rank, rank)])
            )
        second.close()
        return right

    assert run_in_memory(body, 2) == [[True] * 3] * 2


def test_what_has_not_changed_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank announces names, shapes, chunks and values once, then only the step."""
    messages: list[Any] = []
    real = peer_copies.pack

    def noting(content: Any) -> bytes:
        messages.append(content)
        return real(content)

    monkeypatch.setattr(peer_copies, "pack", noting)
    states = [(step, SMALL, {"lr": 0.1}) for step in (1, 2, 3)]
    run_in_memory(copied_steps, 2, states)
    assert sorted(each[0] for each in messages) == [1, 1, 2, 2, 3, 3]
    assert [each[1:] for each in messages if each[0] > 1] == [[None, None]] * 4


def test_an_inventory_stays_the_same_object_only_for_the_same_tensors() -> None:
    """A chunk of the same size may be of a larger tensor."""
    catalogue, chunk = Catalogue(2), Chunk(offsets=(0, 0), sizes=(2, 6))

    def inventory(num_rows: int, step: int) -> Inventory:
        shard = TensorShard(shape=(num_rows, 6), chunk=chunk, tensor=torch.ones(2, 6))
        return catalogue.inventory_of(StateShard(step=step, shards={W: shard}))

    first = inventory(4, step=1)
    assert inventory(4, step=2) is first
    assert inventory(8, step=3).metas[W].shape == (8, 6)
