"""Layouts of all ranks together are a whole model if they contain each element exactly once."""

import itertools
import random
from collections import Counter

import pytest

from shoal_server.core.publications.coverage import (
    NotCovered,
    PublishedLayout,
    PublishedSlice,
    PublishedTensor,
    check_cover,
    merged,
)

W = PublishedTensor("w", "float32", (4, 6), 4)


def layout(
    *slices: PublishedSlice, tensors: tuple[PublishedTensor, ...] = (W,), size: int = 1000
) -> PublishedLayout:
    return PublishedLayout(tensors, slices, (size,))


def box(
    offsets: tuple[int, ...], sizes: tuple[int, ...], segment: int = 0, at: int = 0
) -> PublishedSlice:
    return PublishedSlice(0, offsets, sizes, segment, at)


def grid(rows: int, columns: int) -> list[PublishedLayout]:
    """Return the parts of a mesh of ranks, each with its block of `w`."""
    height, width = 4 // rows, 6 // columns
    blocks = itertools.product(range(rows), range(columns))
    return [
        layout(box((height * row, width * column), (height, width), rank))
        for rank, (row, column) in enumerate(blocks)
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 1), (1, 6), (2, 3)])
def test_the_blocks_of_a_mesh_cover_a_model(rows: int, columns: int) -> None:
    whole = merged(grid(rows, columns))
    check_cover(whole)
    assert whole.tensors == (W,) and len(whole.segment_bytes) == rows * columns


def test_a_slice_without_offsets_is_a_whole_tensor() -> None:
    scalar = PublishedTensor("step", "int64", (), 8)
    empty = PublishedTensor("none", "float32", (0, 3), 4)
    check_cover(
        layout(
            PublishedSlice(0, (), (), 0, 0),
            PublishedSlice(1, (), (), 0, 96),
            tensors=(W, scalar, empty),
        )
    )


def test_tensors_of_several_ranks_are_merged_into_one_list() -> None:
    bias = PublishedTensor("b", "float32", (6,), 4)
    parts = [
        PublishedLayout((W,), (PublishedSlice(0, (0, 0), (4, 6), 0, 0),), (96,)),
        PublishedLayout((bias, W), (PublishedSlice(0, (0,), (6,), 1, 0),), (24,)),
    ]
    whole = merged(parts)
    assert [each.name for each in whole.tensors] == ["w", "b"]
    assert [each.tensor for each in whole.slices] == [0, 1]
    check_cover(whole)


@pytest.mark.parametrize(
    ("slices", "what"),
    [
        ([box((0, 0), (4, 5))], "not whole: 20 of 24"),
        ([box((0, 0), (4, 6)), box((3, 5), (1, 1))], "elements twice"),
        ([box((0, 0), (3, 6)), box((2, 0), (2, 6))], "elements twice"),
        ([box((0, 0), (5, 6))], "reaches beyond tensor w"),
        ([box((0,), (4,))], "reaches beyond tensor w"),
        ([box((0, 0), (4, 6), at=905)], "reaches beyond its segment"),
        ([], "not whole: 0 of 24"),
        # As many elements as the tensor has, but one is missing.
        ([box((0, 0), (4, 5)), box((0, 0), (4, 1))], "elements twice"),
    ],
)
def test_slices_that_are_no_whole_tensor_are_refused_with_its_name(
    slices: list[PublishedSlice], what: str
) -> None:
    with pytest.raises(NotCovered, match="tensor w") as refused:
        check_cover(layout(*slices))
    assert what in str(refused.value)


def test_parts_that_disagree_or_lack_an_own_segment_are_refused() -> None:
    other = PublishedTensor("w", "bfloat16", (4, 6), 2)
    parts = [layout(box((0, 0), (4, 6))), PublishedLayout((other,), (), (0,))]
    with pytest.raises(NotCovered, match="disagree on tensor w"):
        merged(parts)
    with pytest.raises(NotCovered, match="not its own"):
        merged([layout(box((0, 0), (4, 6), segment=1))])
    with pytest.raises(NotCovered, match="no segment of its own"):
        merged([PublishedLayout((W,), (), ())])


@pytest.mark.parametrize("seed", range(40))
def test_the_check_agrees_with_a_count_of_elements(seed: int) -> None:
    """The boxes are cut at random from a whole tensor; some are missing or repeated."""
    chance = random.Random(seed)
    shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(chance.randint(0, 8)):
        offsets, sizes = boxes.pop(chance.randrange(len(boxes)))
        along = chance.randrange(len(shape))
        first = chance.randint(0, sizes[along])
        lower, upper = list(sizes), list(sizes)
        lower[along], upper[along] = first, sizes[along] - first
        moved = list(offsets)
        moved[along] += first
        boxes += [(offsets, tuple(lower)), (tuple(moved), tuple(upper))]
    if chance.random() < 0.5:
        boxes.append(boxes[chance.randrange(len(boxes))])
    if chance.random() < 0.3:
        boxes.pop(chance.randrange(len(boxes)))
    counts = Counter(
        element
        for offsets, sizes in boxes
        for element in itertools.product(
            *(range(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        )
    )
    is_whole = set(counts) == set(itertools.product(*map(range, shape)))
    is_once = set(counts.values()) <= {1}
    tensor = PublishedTensor("t", "uint8", shape, 1)
    found = layout(*(box(*each) for each in boxes), tensors=(tensor,))
    if is_whole and is_once:
        check_cover(found)
    else:
        with pytest.raises(NotCovered):
            check_cover(found)


def test_a_tensor_of_4096_slices_is_checked() -> None:
    """The tensor is cut along its last dimension."""
    tensor = PublishedTensor("w", "uint8", (2, 4096), 1)
    slices = [box((0, column), (2, 1)) for column in range(4096)]
    check_cover(layout(*slices, tensors=(tensor,)))
