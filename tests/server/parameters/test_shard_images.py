"""Copies of shards: a copy that replays the same pushes equals its shard, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters.snapshot_world import loaded
from support.models.dense_shards import EPOCH, SIZES, SPECS, is_live, new_shard, numbers

from shoal_proto.errors import InternalError, ShapeMismatch, WrongEpoch
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.shard.dense import DensePush, DenseShard, dense_from_image
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.sessions import MAX_SESSIONS


@dataclass(frozen=True)
class Move:
    """A push of one of three sessions; it may be repeated, and a copy may begin before it."""

    session: int
    blocks: tuple[int, ...]
    lr: float | None
    behind: int
    repeats: bool
    copies: bool


MOVES = st.builds(
    Move,
    session=st.integers(0, 2),
    blocks=st.sets(st.integers(0, len(SIZES) - 1)).map(lambda blocks: tuple(sorted(blocks))),
    lr=st.none() | st.floats(0.0, 0.5),
    behind=st.integers(0, 4),
    repeats=st.booleans(),
    copies=st.booleans(),
)


def bits(image: LoadedImage) -> tuple[int, bytes, dict[str, bytes], Sequence[object]]:
    """Return everything in an image, for comparison."""
    tensors = {n: t.view(torch.uint8).numpy().tobytes() for n, t in image.tensors.items()}
    return image.version, image.spec, tensors, list(image.sessions)


def to_push(move: Move, number: int, shard: DenseShard, dtype: str) -> DensePush:
    size = sum(SIZES[b] for b in move.blocks)
    return DensePush(
        session=f"s{move.session}",
        sequence=number,
        epoch=EPOCH,
        base_version=max(1, shard.version - move.behind),
        lr=move.lr,
        blocks=move.blocks,
        gradient=numbers(number, 2 * size if shard.body.needs_base else size, dtype),
    )


@pytest.mark.sampled()
@settings(max_examples=8, deadline=None)
@given(moves=st.lists(MOVES, max_size=10))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SPECS)
def test_a_replaying_copy_is_the_same_bit_for_bit(case: str, dtype: str, moves: list[Move]) -> None:
    """Values, optimizer state and sessions are equal, whenever the copy was begun. Later pushes,
    also repeated ones, have the same effect on both."""
    shard = new_shard(case, dtype)
    records: list[UpdateRecord] = []
    copies = [(dense_from_image(loaded(shard, records.append)), 0)]
    pushes: list[DensePush] = []
    for number, move in enumerate(moves, start=1):
        if move.copies:
            copies.append((dense_from_image(loaded(shard)), len(records)))
        pushes.append(to_push(move, number, shard, dtype))
        for push in (pushes[-1],) * (2 if move.repeats else 1):
            shard.push(push, is_live)
    assert [record.push.version for record in records] == list(range(2, len(moves) + 2))
    after = to_push(Move(0, (0, 2, 3), None, 1, False, False), 99, shard, dtype)
    wanted = bits(loaded(shard))
    answers = [shard.push(p, is_live) for p in (*pushes[-1:], after)]
    for copy, begun in copies:
        for record in records[begun : len(moves)]:
            copy.replay(record)
        assert bits(loaded(copy)) == wanted
        again = [copy.push(p, is_live) for p in (*pushes[-1:], after)]
        assert again == answers
        assert bits(loaded(copy))[2] == bits(loaded(shard))[2]


def a_push(sequence: int = 1, session: str = "s") -> DensePush:
    return DensePush(
        session=session,
        sequence=sequence,
        epoch=EPOCH,
        base_version=1,
        lr=None,
        blocks=(1,),
        gradient=numbers(sequence, SIZES[1], "float32"),
    )


def test_an_image_keeps_its_version() -> None:
    """Later pushes change only the shard. The subscriber of the newest image gets them."""
    shard = new_shard("adam", "float32")
    shard.push(a_push(1), is_live)
    first: list[UpdateRecord] = []
    image = loaded(shard, first.append)
    before = bits(image)
    shard.push(a_push(2), is_live)
    second: list[UpdateRecord] = []
    loaded(shard, second.append)
    shard.push(a_push(3), is_live)
    assert bits(image) == before
    assert image.version == 2
    assert [record.push.sequence for record in first] == [2]
    assert [record.push.sequence for record in second] == [3]
    assert first[0].data == a_push(2).gradient


def test_a_record_out_of_order_is_refused() -> None:
    """A gap, a repetition or a short record is an error, and changes nothing."""
    shard = new_shard("nesterov", "float32")
    records: list[UpdateRecord] = []
    copy = dense_from_image(loaded(shard, records.append))
    for sequence in (1, 2):
        shard.push(a_push(sequence), is_live)
    with pytest.raises(InternalError, match="saw version 3; expected version 2"):
        copy.replay(records[1])
    with pytest.raises(ShapeMismatch):
        copy.replay(replace(records[0], data=records[0].data[:-4]))
    copy.replay(records[0])
    with pytest.raises(InternalError, match="saw version 2; expected version 3"):
        copy.replay(records[0])
    copy.replay(records[1])
    assert bits(loaded(copy)) == bits(loaded(shard))


def test_a_copy_forgets_the_sessions_that_its_primary_forgot() -> None:
    """The primary's record names the forgotten sessions: a copy does not know which members are
    alive."""
    shard = new_shard("sgd", "float32")
    records: list[UpdateRecord] = []
    copy = dense_from_image(loaded(shard, records.append))
    for number in range(MAX_SESSIONS):
        shard.push(a_push(1, f"s{number}"), is_live)
    shard.push(a_push(1, "new"), lambda session: session not in ("s3", "s5"))
    assert list(records[-1].push.forgotten_sessions) == ["s3", "s5"]
    for record in records:
        copy.replay(record)
    assert bits(loaded(copy)) == bits(loaded(shard))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "table"},
        {"spec": b"\xff\xff"},
        {"tensors": {}},
        {"tensors": {"values": torch.zeros(sum(SIZES))}},
        {"tensors": {"values": torch.zeros(3)}},
    ],
)
def test_an_incomplete_image_is_refused(change: dict[str, object]) -> None:
    """An image of another kind or of another layout is refused as well."""
    image = loaded(new_shard("adam", "float32"))
    with pytest.raises(InternalError):
        dense_from_image(replace(image, **change))  # type: ignore[arg-type]


def test_a_base_version_lost_with_a_primary_counts_as_the_newest() -> None:
    """A worker may have seen a version before a failover that the new primary does not have."""
    shard = new_shard("sgd", "float32")
    push = replace(a_push(), base_version=5, base_epoch=EPOCH - 1)
    outcome = shard.push(push, is_live)
    assert (outcome.version, outcome.staleness) == (2, 0)


@pytest.mark.parametrize("base_version", [500, 301])
def test_updates_after_a_rollback_count_as_staleness_on_a_base_version_that_was_undone(
    base_version: int,
) -> None:
    """The shard was restored at version 300. A base version of the undone training stays undone
    when the restored shard reaches its number again."""
    shard = dense_from_image(replace(loaded(new_shard("sgd", "float32")), version=300))
    shard.enter_epoch(EPOCH + 1)
    undone = replace(a_push(), epoch=EPOCH + 1, base_version=base_version, base_epoch=EPOCH)
    staleness = [
        shard.push(replace(undone, session=f"s{number}"), is_live).staleness for number in range(3)
    ]
    assert staleness == [0, 1, 2]


def test_pushes_of_an_earlier_epoch_are_refused() -> None:
    """Refused pushes change nothing, also repeated ones. A repetition in the new epoch gets its
    first outcome."""
    shard = new_shard("sgd", "float32")
    shard.push(a_push(1), is_live)
    shard.enter_epoch(EPOCH + 1)
    before = bits(loaded(shard))
    for sequence in (1, 2):
        with pytest.raises(WrongEpoch, match="saw 3; expected 4"):
            shard.push(a_push(sequence), is_live)
    assert bits(loaded(shard)) == before
    outcome = shard.push(replace(a_push(1), epoch=EPOCH + 1), is_live)
    assert (outcome.version, outcome.is_duplicate) == (2, True)


def test_a_subscriber_can_be_removed() -> None:
    """The removed subscriber gets no later records."""
    shard = new_shard("sgd", "float32")
    records: list[UpdateRecord] = []
    shard.subscribe(records.append)
    shard.push(a_push(1), is_live)
    shard.subscribe(None)
    shard.push(a_push(2), is_live)
    assert [record.push.sequence for record in records] == [1]
