"""Cutting the contents of a batch along the samples; errors name what cannot be cut."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.data.parts import cut, has_all_rows, rows_of_fewer
from shoal.data.samples import Samples
from shoal_proto.errors import InvalidSpec

Pair = namedtuple("Pair", ["left", "right"])
ROWS = torch.arange(8).view(4, 2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (ROWS, ROWS[1:3]),
        ((ROWS, None), (ROWS[1:3], None)),
        ([ROWS, ROWS], [ROWS[1:3], ROWS[1:3]]),
        ({"a": ROWS, "b": (ROWS,)}, {"a": ROWS[1:3], "b": (ROWS[1:3],)}),
        (UserDict(a=ROWS), UserDict(a=ROWS[1:3])),
        (Pair(ROWS, ["a", "b", "c", "d"]), Pair(ROWS[1:3], ["b", "c"])),
        ([torch.ones(3), torch.ones(2), torch.ones(4), torch.ones(1)], [torch.ones(2)] * 2),
        (None, None),
    ],
)
def test_values_are_cut_along_their_first_dimension(values: Any, expected: Any) -> None:
    found = cut(values, 1, 3, 4)
    assert type(found) is type(expected)
    if not isinstance(values, list) or len(values) != 4:
        assert str(found) == str(expected)
    else:
        assert [len(each) for each in found] == [2, 4], "items of the list, whatever their sizes"


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        (torch.tensor(3.0), r"shape \(\)"),
        (ROWS.T, r"shape \(2, 4\)"),
        ((ROWS, torch.ones(5)), "tuple of 2"),
        ({"scale": 2.0}, "a float"),
        ([ROWS, ROWS, ROWS, ROWS], "4 tensors of 4 rows"),
        (["a", "b"], "a list of 2"),
    ],
)
def test_values_that_cannot_be_assigned_to_samples_are_refused(values: Any, seen: str) -> None:
    with pytest.raises(InvalidSpec, match=seen):
        cut(values, 1, 3, 4)


@pytest.mark.parametrize(
    ("values", "size", "rows"),
    [
        ((ROWS, torch.ones(4)), 5, 4),
        ((torch.ones(4, 3, 5, 5), torch.ones(4)), 5, 4),
        (({"a": ROWS, "b": [torch.ones(4, 7)]}, None), 6, 4),
        ((ROWS[:0], torch.ones(0)), 4, 0),
        ((ROWS, torch.ones(4)), 4, None),
        # Twice as many views as samples.
        ((ROWS, torch.ones(4)), 2, None),
        # Time first: sentences of samples, with a mask.
        ((torch.ones(3, 9), torch.ones(3, 9), torch.ones(3, 3)), 9, None),
        # Parts of different sizes: nodes of graphs, tokens in a row.
        ((ROWS, torch.ones(9)), 12, None),
        (([{"boxes": ROWS}] * 5, torch.ones(4)), 5, None),
        ((["a", "b"], None), 3, None),
        ((torch.tensor(3.0), None), 3, None),
    ],
)
def test_the_number_of_rows_is_found_if_samples_were_left_out(
    values: Any, size: int, rows: int | None
) -> None:
    assert rows_of_fewer(values, size) == rows
    assert rows is None or not any(has_all_rows(each, size) for each in values)


def test_parts_need_a_step() -> None:
    batch = Loader((ROWS,), Order(num_samples=4, global_batch_size=4)).synchronous(0, 0, 1)
    with pytest.raises(InvalidSpec, match=r"session\.step"):
        next(batch.parts(2))


class Boxes:
    """Images of `size` channels (or rows), each with as many boxes. For `size` samples, one item
    per sample has the same shape as one tensor for all of them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = torch.full((self._size, 2), float(index))
        return rows, {"boxes": rows + 100, "labels": rows + 200}


def zipped(samples: list[Any]) -> Any:
    """Collate as scripts for detection do."""
    return tuple(zip(*samples, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seeded", [True, False])
def test_one_item_a_sample_is_distinguished_from_one_tensor_for_all(
    size: int, seeded: bool
) -> None:
    """A list with one image for each sample is cut by items, even if images have as many rows as
    there are samples. Cut by rows, a part would be wrong without an error."""
    samples = Samples(Boxes(size), zipped, 0, seeded=seeded)
    images, boxes = samples.batch(0, range(4, 4 + size), lambda: True)
    last_images, last_boxes = cut(images, size - 1, size, size), cut(boxes, size - 1, size, size)
    assert [image.tolist() for image in last_images] == [[[3.0 + size] * 2] * size]
    assert [box["labels"].tolist() for box in last_boxes] == [[[203.0 + size] * 2] * size]


@pytest.mark.parametrize("size", [2, 3])
def test_one_tensor_for_all_samples_is_cut_along_the_samples(size: int) -> None:
    """A tuple has as many fields as there are samples."""

    def fields(samples: list[Any]) -> Any:
        images = torch.stack([image for image, _ in samples])
        return tuple(images + 10 * field for field in range(size)), images

    inputs, _ = Samples(Boxes(size), fields, 0).batch(0, range(size), lambda: True)
    found = cut(inputs, 1, 2, size)
    assert [len(each) for each in found] == [1] * size
    assert [float(each.flatten()[0]) for each in found] == [
        1.0 + 10 * field for field in range(size)
    ]
