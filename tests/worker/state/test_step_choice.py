"""Choice of the step from which ranks continue: the newest that is whole on them together."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.state.inventory import Inventory, Meta, ShardListing
from shoal.state.shards import Chunk
from shoal.state.step_choice import choose
from shoal_proto.errors import DtypeMismatch, ShapeMismatch, StateLost

W, B, M, S = "model.w", "model.b", "optim.w/exp_avg", "optim.w/step"
SHAPES: dict[str, tuple[int, ...]] = {W: (4, 6), B: (3,), M: (4, 6), S: ()}
WHOLE = {name: Chunk.whole(shape) for name, shape in SHAPES.items()}
TOP, BOTTOM = (Chunk(offsets=(row, 0), sizes=(2, 6)) for row in (0, 2))
LEFT, RIGHT = (Chunk(offsets=(0, column), sizes=(4, 3)) for column in (0, 3))
MIDDLE = Chunk(offsets=(1, 0), sizes=(3, 6))


def rank(*listings: ShardListing) -> Inventory:
    names = {name for listing in listings for name in listing.chunks}
    return Inventory(
        metas={name: Meta(SHAPES[name], torch.float32) for name in names}, listings=listings
    )


def at(step: int, elsewhere: Sequence[str] = (), **chunks: Chunk) -> ShardListing:
    named = {{"w": W, "b": B, "m": M, "s": S}[key]: chunk for key, chunk in chunks.items()}
    return ShardListing(
        step=step, chunks=named, values={"step": step}, elsewhere=frozenset(elsewhere)
    )


FULL = {"w": WHOLE[W], "b": WHOLE[B], "m": WHOLE[M], "s": WHOLE[S]}
MODEL_ONLY = {"w": WHOLE[W], "b": WHOLE[B]}

CASES: dict[str, tuple[list[Inventory], int]] = {
    "one rank holds all": ([rank(at(3, **FULL)), rank()], 3),
    "the one that is further": ([rank(at(3, **FULL)), rank(at(4, **FULL))], 4),
    "rows": ([rank(at(3, w=TOP, b=WHOLE[B])), rank(at(3, w=BOTTOM))], 3),
    "rows that overlap": ([rank(at(3, w=TOP, b=WHOLE[B])), rank(at(3, w=MIDDLE))], 3),
    "rows of different steps": (
        [rank(at(4, w=TOP, b=WHOLE[B]), at(3, w=TOP, b=WHOLE[B])), rank(at(3, w=BOTTOM))],
        3,
    ),
    "rows beside columns": (
        [rank(at(3, w=TOP, b=WHOLE[B])), rank(at(3, w=RIGHT)), rank(at(3, w=LEFT))],
        3,
    ),
    "a peer's copy fills the gap": (
        [rank(at(4, w=TOP)), rank(at(2, w=TOP, b=WHOLE[B]), at(2, w=BOTTOM))],
        2,
    ),
    "no optimizer state yet": ([rank(at(0, **MODEL_ONLY))], 0),
    "new optimizer state": ([rank(at(0, **MODEL_ONLY), at(5, **FULL))], 5),
    "optimizer state lost: known from before": (
        [rank(at(5, **MODEL_ONLY), at(3, **FULL))],
        3,
    ),
    "optimizer state lost: known from another rank": (
        [rank(at(5, [M], **MODEL_ONLY), at(0, **MODEL_ONLY))],
        0,
    ),
    "a parameter lost: known from a later step": (
        [rank(at(5, w=WHOLE[W]), at(3, w=WHOLE[W], b=WHOLE[B])), rank(at(6, b=WHOLE[B]))],
        3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_newest_whole_step_is_chosen(case: str) -> None:
    """The choice has the values and the names of that step."""
    inventories, step = CASES[case]
    chosen = choose(inventories)
    assert chosen.step == step
    assert chosen.values == {"step": step}
    assert list(chosen.metas) == sorted(chosen.holders)


def test_holders_are_listed_for_each_chunk() -> None:
    """A rank that holds a chunk twice, live and as a copy, counts once."""
    chosen = choose([rank(at(3, w=TOP), at(3, w=TOP)), rank(at(3, w=BOTTOM), at(3, w=TOP))])
    assert chosen.holders == {W: {TOP: [0, 1], BOTTOM: [1]}}
    assert not chosen.on_each(2)
    assert choose([rank(at(3, **FULL))] * 2).on_each(2)


def test_the_error_for_a_lost_state_names_its_first_missing_parts() -> None:
    """The error also lists every step that was considered."""
    inventories = [
        rank(at(9, w=TOP, b=WHOLE[B]), at(7, w=LEFT, b=WHOLE[B])),
        rank(at(9, [M], w=TOP)),
    ]
    with pytest.raises(StateLost) as lost:
        choose(inventories)
    error = lost.value
    assert error.details["9"] == f"{W} [2:4, 0:6], {M}"
    assert error.details["7"] == f"{W} [0:4, 3:6]"
    assert "at step 9 no member has model.w [2:4, 0:6]" in str(error)
    assert "checkpoint" in error.fix


def test_many_missing_parts_are_not_all_named() -> None:
    """Three are named for each step."""
    names = [f"model.{index}" for index in range(50)]
    with pytest.raises(StateLost) as lost:
        choose([rank(at(1, names, b=WHOLE[B]))])
    assert lost.value.details == {"1": "model.0, model.1, model.10, ..."}


def test_members_that_hold_nothing_have_lost_the_state() -> None:
    """The state is lost when all members that knew it are gone."""
    with pytest.raises(StateLost, match="hold nothing"):
        choose([rank(), rank()])


@pytest.mark.parametrize(
    ("meta", "error"),
    [(Meta((4, 7), torch.float32), ShapeMismatch), (Meta((4, 6), torch.half), DtypeMismatch)],
)
def test_ranks_that_contradict_each_other_are_refused(meta: Meta, error: type[Exception]) -> None:
    """The error names the tensor."""
    other = Inventory(metas={W: meta}, listings=[])
    with pytest.raises(error, match=W):
        choose([rank(at(1, w=TOP)), other])


@st.composite
def worlds(draw: st.DrawFn) -> list[Inventory]:
    """Draw up to four ranks with arbitrary chunks of two tensors, at up to three steps."""
    inventories = []
    for _ in range(draw(st.integers(1, 4))):
        listings = []
        for step in draw(st.lists(st.integers(0, 2), max_size=4)):
            chunks = {}
            for name in draw(st.sets(st.sampled_from([W, S]))):
                spans = [
                    sorted(draw(st.sets(st.integers(0, extent), min_size=2, max_size=2)))
                    for extent in SHAPES[name]
                ]
                chunks[name] = Chunk(
                    offsets=tuple(start for start, _ in spans),
                    sizes=tuple(stop - start for start, stop in spans),
                )
            listings.append(ShardListing(step=step, chunks=chunks))
        inventories.append(rank(*listings))
    return inventories


def slowly(inventories: list[Inventory]) -> int | None:
    """Choose the step by checking every element."""
    listings = [listing for inventory in inventories for listing in inventory.listings]
    for step in sorted({listing.step for listing in listings}, reverse=True):
        known = {n for o in listings if o.step <= step or W in o.chunks for n in o.chunks}
        names = {
            n for n in known if n == W or any(n in o.chunks for o in listings if o.step <= step)
        }
        held = {name: np.zeros(SHAPES[name], bool) for name in names}
        for listing in listings:
            if listing.step == step:
                for name, chunk in listing.chunks.items():
                    held[name][chunk.slices_in(WHOLE[name])] = True
        if all(array.all() for array in held.values()):
            return step
    return None


@pytest.mark.long
@given(worlds())
@settings(max_examples=150, deadline=None)
def test_the_choice_is_that_of_looking_at_every_element(inventories: list[Inventory]) -> None:
    """Chunks are arbitrary."""
    try:
        chosen: int | None = choose(inventories).step
    except StateLost:
        chosen = None
    assert chosen == slowly(inventories)
