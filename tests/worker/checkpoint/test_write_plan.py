"""Write plans: each element of a state is written by exactly one rank."""

import pytest
import torch

from shoal.checkpoint import write_plan as module
from shoal.checkpoint.write_plan import PlannedChunk, from_json, plan_writes, to_json
from shoal.state.shards import Chunk
from shoal_proto.errors import DtypeMismatch, InvalidSpec, ShapeMismatch


def outline(offsets, sizes, shape=(4, 6), name="model.w", dtype=torch.float32):
    return PlannedChunk(
        name=name, shape=shape, dtype=dtype, chunk=Chunk(offsets=offsets, sizes=sizes)
    )


WHOLE = outline((0, 0), (4, 6))
TOP, BOTTOM = outline((0, 0), (2, 6)), outline((2, 0), (2, 6))
LEFT, RIGHT = outline((0, 0), (4, 3)), outline((0, 3), (4, 3))
SCALAR = outline((), (), shape=(), name="optim.w/step")
NOTHING = outline((4, 0), (0, 6))


@pytest.mark.parametrize(
    ("held", "written"),
    [
        ([[WHOLE]], [[WHOLE]]),
        ([[WHOLE], [WHOLE], [WHOLE]], [[WHOLE], [], []]),
        ([[TOP], [BOTTOM]], [[TOP], [BOTTOM]]),
        ([[RIGHT], [LEFT], [RIGHT], [LEFT]], [[RIGHT], [LEFT], [], []]),
        ([[TOP, SCALAR], [BOTTOM, SCALAR]], [[TOP, SCALAR], [BOTTOM]]),
        ([[], [WHOLE]], [[], [WHOLE]]),
        ([[WHOLE], [NOTHING]], [[WHOLE], []]),
        (
            [[outline((0, 0), (0, 6), shape=(0, 6))]] * 2,
            [[outline((0, 0), (0, 6), shape=(0, 6))], []],
        ),
    ],
)
def test_each_element_is_written_once_by_the_lowest_rank_that_holds_it(held, written):
    assert plan_writes(held) == written


@pytest.mark.parametrize(
    ("held", "error", "reason"),
    [
        ([[TOP], []], InvalidSpec, "the ranks together do not hold all of model.w"),
        ([[TOP], [LEFT]], InvalidSpec, "overlap each other"),
        # As many elements as the whole tensor has, but some twice and some not at all.
        ([[TOP], [outline((1, 0), (2, 6))]], InvalidSpec, "overlap each other"),
        ([[TOP], [outline((0, 0), (4, 6), shape=(4, 7))]], ShapeMismatch, "rank 1"),
        ([[TOP], [outline((2, 0), (2, 6), dtype=torch.float64)]], DtypeMismatch, "rank 1"),
    ],
)
def test_ranks_that_do_not_hold_one_whole_state_are_refused(held, error, reason):
    with pytest.raises(error, match=reason):
        plan_writes(held)


def test_a_known_tensor_that_no_rank_holds_is_refused():
    with pytest.raises(InvalidSpec, match=r"no rank holds any of model\.lost"):
        plan_writes([[TOP], [BOTTOM]], known={"model.w", "model.lost"})


def test_large_chunks_are_cut_by_rows_into_parts_that_cover_them(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 100)
    lower = outline((3, 0), (7, 6), shape=(10, 6))
    [first, second] = plan_writes([[outline((0, 0), (3, 6), shape=(10, 6))], [lower]])
    assert [chunk.chunk.sizes for chunk in first] == [(3, 6)]
    assert [(chunk.chunk.offsets, chunk.chunk.sizes) for chunk in second] == [
        ((3, 0), (4, 6)),
        ((7, 0), (3, 6)),
    ]


def test_planned_chunks_are_the_same_after_conversion_to_json_and_back():
    outlines = [WHOLE, SCALAR, outline((2, 0), (2, 6), dtype=torch.bfloat16)]
    assert from_json(to_json(outlines)) == outlines
