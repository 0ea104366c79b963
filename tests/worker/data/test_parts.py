"""Cutting what a batch holds: along the samples, or an error that says what cannot be cut."""

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from shoal.data.batches import Loader, Order
from shoal.data.parts import cut
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
def test_samples_are_the_first_dimension(values: Any, expected: Any) -> None:
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
def test_what_does_not_say_whose_it_is_is_refused(values: Any, seen: str) -> None:
    with pytest.raises(InvalidSpec, match=seen):
        cut(values, 1, 3, 4)


def test_parts_need_a_step() -> None:
    batch = Loader((ROWS,), Order(num_samples=4, global_batch_size=4)).synchronous(0, 0, 1)
    with pytest.raises(InvalidSpec, match=r"session\.step"):
        next(batch.parts(2))
