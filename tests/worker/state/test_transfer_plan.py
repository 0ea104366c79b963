"""Transfer plans: every rank gets exactly what it needs, from ranks that have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collectives.state_bodies import cut

from shoal.state.inventory import Meta
from shoal.state.shards import Chunk
from shoal.state.step_choice import ChosenStep
from shoal.state.transfer_plan import NamedChunk, TransferPlan, plan

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class World:
    """Chunks that ranks hold and need, by rank; float32 throughout."""

    shapes: Mapping[str, tuple[int, ...]]
    held: Sequence[Mapping[str, Sequence[Chunk]]]
    needs: Sequence[Mapping[str, Chunk]]

    def plans(self, stripe_bytes: int = MEGABYTE) -> list[TransferPlan]:
        holders: dict[str, dict[Chunk, list[int]]] = {name: {} for name in sorted(self.shapes)}
        for rank, held in enumerate(self.held):
            for name, chunks in held.items():
                for chunk in dict.fromkeys(chunks):
                    holders[name].setdefault(chunk, []).append(rank)
        chosen = ChosenStep(
            step=1,
            metas={name: Meta(self.shapes[name], torch.float32) for name in holders},
            holders=holders,
            values={},
        )
        ranks = range(len(self.held))
        return [plan(chosen, self.needs, rank, stripe_bytes=stripe_bytes) for rank in ranks]

    def has(self, rank: int, part: NamedChunk) -> bool:
        """True if the part lies in one chunk that the rank holds."""
        chunks = self.held[rank].get(part.name, ())
        return any(chunk.overlap(part.chunk) == part.chunk for chunk in chunks)


def world(
    shapes: Mapping[str, tuple[int, ...]], before: tuple[str, int], after: tuple[str, int]
) -> World:
    """Return a world whose first ranks hold the state cut in one way, and whose first ranks need it
    cut in another."""
    num_ranks = max(before[1], after[1])

    def chunks(how: str, rank: int, size: int) -> dict[str, Chunk]:
        found = {name: cut(shape, how, rank, size) for name, shape in shapes.items()}
        return {name: chunk for name, chunk in found.items() if chunk is not None and rank < size}

    held = [
        {name: [chunk] for name, chunk in chunks(before[0], rank, before[1]).items()}
        for rank in range(num_ranks)
    ]
    return World(shapes, held, [chunks(after[0], rank, after[1]) for rank in range(num_ranks)])


def check(given: World, plans: Sequence[TransferPlan]) -> None:
    """Check what must hold for every plan."""
    for rank, own in enumerate(plans):
        filled = {n: np.zeros(given.shapes[n], int) for n in given.needs[rank]}
        for part in own.kept:
            assert given.has(rank, part)
        for sender, parts in own.receives.items():
            assert sender != rank
            assert plans[sender].sends[rank] == parts, "sender and receiver differ"
            for part in parts:
                assert given.has(sender, part)
                assert not given.has(rank, part), "it holds this itself"
        for receiver in own.sends:
            assert rank in plans[receiver].receives
        for part in [*own.kept, *(part for parts in own.receives.values() for part in parts)]:
            filled[part.name][part.chunk.slices_in(Chunk.whole(given.shapes[part.name]))] += 1
        for name, chunk in given.needs[rank].items():
            needed = np.zeros(given.shapes[name], int)
            needed[chunk.slices_in(Chunk.whole(given.shapes[name]))] = 1
            assert np.array_equal(filled[name], needed), f"rank {rank}, {name}"


def num_bytes(parts: Sequence[NamedChunk]) -> int:
    return sum(part.chunk.num_elements * 4 for part in parts)


SHAPES = {"a": (10, 7), "b": (2,), "c": (3, 1, 5), "d": (), "e": (1, 13)}
CHANGES = [
    (("rows", 3), ("rows", 2)),
    (("rows", 2), ("rows", 3)),
    (("rows", 4), ("rows", 3)),
    (("rows", 3), ("columns", 3)),
    (("columns", 4), ("rows", 2)),
    (("whole", 2), ("rows", 4)),
    (("whole", 1), ("whole", 3)),
    (("rows", 3), ("whole", 2)),
]


@pytest.mark.parametrize("stripe_bytes", [1, 16, 64, MEGABYTE])
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_any_cut_becomes_any_other(
    before: tuple[str, int], after: tuple[str, int], stripe_bytes: int
) -> None:
    """The state has indivisible sizes, fewer rows than ranks, and scalars; stripes have any
    size."""
    given = world(SHAPES, before, after)
    check(given, given.plans(stripe_bytes))


@pytest.mark.parametrize("how", ["whole", "rows", "columns"])
def test_nothing_is_sent_if_each_rank_has_what_it_needs(how: str) -> None:
    """Holds for the same ranks with the same cut."""
    given = world(SHAPES, (how, 3), (how, 3))
    plans = given.plans()
    check(given, plans)
    assert not any(own.sends or own.receives for own in plans)


def test_a_rank_keeps_in_one_part_what_it_has_in_one_chunk() -> None:
    """Holds although other ranks have the same elements in other chunks."""
    given = world({"a": (8, 8)}, ("rows", 4), ("rows", 4))
    held = [*given.held[:3], {"a": [Chunk.whole((8, 8)), *given.held[3]["a"]]}]
    needs = [{}, {}, {}, {"a": Chunk.whole((8, 8))}]
    (*_, own) = World({"a": (8, 8)}, held, needs).plans()
    assert own == TransferPlan(kept=[NamedChunk("a", Chunk.whole((8, 8)))])


@pytest.mark.parametrize(
    "shapes",
    [
        {"one": (6000, 1000)},
        {f"layer{index:03}": (60, 1000) for index in range(100)},
        {"flat": (6_000_000,)},
        {"long rows": (2, 3_000_000)},
        {f"odd{index:02}": (1536 * 1024 // 4,) for index in range(16)},
    ],
    ids=lambda shapes: next(iter(shapes)),
)
def test_ranks_that_hold_the_same_share_the_sending(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Three ranks send 24 MB to one newcomer: a third each, within about a stripe and a row."""
    given = world(shapes, ("whole", 3), ("whole", 4))
    plans = given.plans(MEGABYTE // 4)
    check(given, plans)
    sent = [num_bytes(own.sends[3]) for own in plans[:3]]
    assert sum(sent) == sum(4 * int(np.prod(shape)) for shape in shapes.values())
    assert max(sent) - min(sent) < 2 * MEGABYTE


def test_several_newcomers_are_served_by_different_ranks() -> None:
    """Holds even for a state that is smaller than a stripe."""
    given = world({"a": (4, 4)}, ("whole", 3), ("whole", 6))
    plans = given.plans()
    check(given, plans)
    assert [len(own.sends) for own in plans] == [1, 1, 1, 0, 0, 0]


def test_no_part_is_larger_than_two_stripes() -> None:
    """A message is bounded, even if a row is longer than a stripe."""
    shapes = {"a": (3, 1000, 9), "b": (100_000,), "c": (1, 2, 50_000)}
    given = world(shapes, ("whole", 1), ("whole", 2))
    plans = given.plans(10_000)
    check(given, plans)
    assert max(num_bytes([part]) for part in plans[1].receives[0]) <= 20_000


@st.composite
def anyhow(draw: st.DrawFn) -> World:
    """Arbitrary chunks, and needs within what the ranks hold together."""
    num_ranks = draw(st.integers(1, 4))
    extents = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {name: draw(extents) for name in ("a", "b")}

    def chunk(shape: tuple[int, ...]) -> Chunk:
        spans = [sorted(draw(st.sets(st.integers(0, e), min_size=2, max_size=2))) for e in shape]
        return Chunk(offsets=tuple(a for a, _ in spans), sizes=tuple(b - a for a, b in spans))

    held: list[dict[str, list[Chunk]]] = [
        {
            name: [chunk(shape) for _ in range(draw(st.integers(1, 3)))]
            for name, shape in shapes.items()
            if draw(st.booleans())
        }
        for _ in range(num_ranks)
    ]
    for name, shape in shapes.items():
        rest = draw(st.integers(0, num_ranks - 1))
        held[rest].setdefault(name, []).append(Chunk.whole(shape))
    needs = [
        {name: chunk(shape) for name, shape in shapes.items() if draw(st.booleans())}
        for _ in range(num_ranks)
    ]
    return World(shapes, held, needs)


@given(anyhow(), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_each_rank_gets_every_element_once_from_one_holder(given: World, stripe: int) -> None:
    """Elements are checked one by one, for chunks that overlap in any way."""
    check(given, given.plans(stripe))
