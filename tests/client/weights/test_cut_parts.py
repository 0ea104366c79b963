"""Runs of a flattened tensor as rectangular slices, and the layouts of a cut's segments."""

from math import prod

import pytest

from shoal_client.weights.cut_parts import boxes, check_layout, cut_parts
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import weights_pb2 as pb


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 1, 3, 2)])
def test_the_slices_of_a_run_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    for start in range(count):
        for stop in range(start + 1, count + 1):
            at = start
            for offsets, sizes, first in boxes(shape, start, stop - start):
                assert first == at, "a slice does not begin at the end of the one before"
                elements = sorted(flat(shape, offsets, sizes))
                assert elements == list(range(at, at + prod(sizes)))
                at += len(elements)
            assert at == stop


def flat(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
    """Numbers of the elements of a slice in the flattened tensor."""
    found = [0]
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        found = [each * extent + offset + i for each in found for i in range(size)]
    return found


def test_a_tied_parameter_has_the_same_bytes_under_each_name() -> None:
    cut = pb.CutTablesReply(
        parameters=[pb.TensorSpec(name="w", dtype="float32", shape=[4])],
        segments=[
            pb.CutSegment(
                segment=pb.Segment(digest=b"d", num_bytes=16),
                blocks=[pb.CutBlock(parameter="w", offset=0, num_elements=4, at=0)],
            )
        ],
    )
    [part] = cut_parts(cut, {"head": "w", "buffer": "other"})
    assert [each.name for each in part.layout.tensors] == ["w", "head"]
    places = {(each.segment, each.at, tuple(each.sizes)) for each in part.layout.slices}
    assert places == {(1, 0, (4,))} and len(part.layout.slices) == 2


def test_a_publishers_tensor_may_not_have_a_name_of_rows() -> None:
    layout = pb.Layout(tensors=[pb.TensorSpec(name="shoal.tables/users/00000/ids")])
    with pytest.raises(InvalidSpec, match="reserved for embedding tables"):
        check_layout(layout)


def test_a_layout_that_no_message_can_carry_is_refused() -> None:
    """gRPC's own error names no tensor, and comes after the bytes are on the servers."""
    names = [f"{number:06d}" + 994 * "x" for number in range(6000)]
    layout = pb.Layout(tensors=[pb.TensorSpec(name=name) for name in names])
    with pytest.raises(InvalidSpec, match="6000 tensors"):
        check_layout(layout)
    del layout.tensors[3000:]
    check_layout(layout)
