"""Meshes: every world size gets one that uses all its ranks and respects the sizes fixed by the
user."""

import pytest
from support.models import tensor_models as models

from shoal.layouts.hybrid.mesh import FixedSizes, ModelFacts, mesh_for
from shoal.strategies.layout.hybrid import Hybrid
from shoal_proto.errors import InvalidSpec

GIB = 1 << 30


def facts(state_bytes: int = 4 * GIB, stages: int = 8, splits: int = 8) -> ModelFacts:
    return ModelFacts(
        state_bytes=state_bytes,
        pipeline_sizes=frozenset(range(1, stages + 1)),
        tensor_sizes=frozenset(size for size in range(2, splits + 1) if splits % size == 0),
    )


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_world_size_has_a_mesh_that_suits_the_model(world_size):
    for bound in (None, 1, GIB, 64 * GIB):
        for stages, splits in ((1, 1), (3, 1), (8, 8), (100, 16)):
            model = facts(stages=stages, splits=splits)
            mesh = mesh_for(world_size, model, FixedSizes(max_rank_bytes=bound))
            assert mesh.world_size == world_size
            assert mesh.pipeline <= stages
            assert mesh.tensor == 1 or mesh.tensor in model.tensor_sizes


@pytest.mark.parametrize(
    ("world_size", "fixed", "expected"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (1, 2, 1)),
        (4, {}, (2, 2, 1)),
        (6, {}, (2, 3, 1)),
        (7, {}, (1, 7, 1)),
        (8, {}, (2, 2, 2)),
        (12, {}, (2, 3, 2)),
        (16, {}, (2, 4, 2)),
        (8, {"tensor": 4}, (1, 2, 4)),
        (8, {"pipeline": 4}, (4, 2, 1)),
        (8, {"data": 1}, (4, 1, 2)),
        (6, {"tensor": 6}, (1, 1, 6)),
        (8, {"pipeline": 2, "data": 2, "tensor": 2}, (2, 2, 2)),
        # 4 GiB of state: as many copies as fit in memory.
        (8, {"max_rank_bytes": 4 * GIB}, (1, 8, 1)),
        (8, {"max_rank_bytes": 2 * GIB}, (2, 4, 1)),
        (8, {"max_rank_bytes": GIB}, (2, 2, 2)),
        (8, {"max_rank_bytes": GIB // 2}, (4, 1, 2)),
        (8, {"max_rank_bytes": 1}, (4, 1, 2)),
        (8, {"max_rank_bytes": GIB, "tensor": 1}, (4, 2, 1)),
    ],
)
def test_the_mesh_of_a_world_size(world_size, fixed, expected):
    assert mesh_for(world_size, facts(), FixedSizes(**fixed)).sizes == expected


@pytest.mark.parametrize(
    ("world_size", "fixed", "message"),
    [
        (6, {"tensor": 4}, r"6 ranks.*tensor=4.*world size 6.*expected 4, 8, 12 or another mul"),
        (9, {"pipeline": 2, "data": 2}, r"pipeline=2 data=2, together 4; expected 4, 8, 12"),
        (8, {"pipeline": 2, "data": 2, "tensor": 1}, r"expected 4 ranks"),
        (10, {"data": 2}, r"10 ranks cannot be arranged as data=2.*Leave data open"),
    ],
)
def test_fixed_sizes_that_do_not_divide_are_named_with_world_sizes_that_fit(
    world_size, fixed, message
):
    with pytest.raises(InvalidSpec, match=message):
        mesh_for(world_size, facts(stages=2, splits=2), FixedSizes(**fixed))


@pytest.mark.parametrize(
    "fixed", [{"pipeline": 0}, {"data": -1}, {"max_rank_bytes": 0}, {"min_split_bytes": -1}]
)
def test_sizes_out_of_range_are_refused_at_once(fixed):
    with pytest.raises(InvalidSpec, match="out of range"):
        Hybrid(**fixed)


def test_the_mesh_follows_from_the_model_as_well():
    model = models.gpt()
    assert Hybrid(min_split_bytes=0).mesh(model, 8).sizes == (2, 2, 2)
    assert Hybrid().mesh(model, 8).tensor == 1, "its layers are too small to be worth splitting"
    assert Hybrid(split_at=[]).mesh(model, 4).pipeline == 1
