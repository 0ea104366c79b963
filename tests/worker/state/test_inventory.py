"""Inventories that ranks exchange: received unchanged, or refused."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.state import inventory as inventories
from shoal.state.inventory import (
    Inventory,
    Meta,
    ShardListing,
    TensorTable,
    chunks_from_json,
    chunks_to_json,
    from_json,
    from_message,
    inventory_of,
    pack,
    to_json,
    to_message,
    unpack,
)
from shoal.state.shards import DTYPES, Chunk, StateShard, TensorShard, groups_of, partition_names
from shoal.state.step_choice import choose
from shoal_proto.errors import DtypeMismatch, MalformedMessage, ShapeMismatch, UnsupportedOptimizer

W = "model.w"


@st.composite
def announced(draw: st.DrawFn) -> Inventory:
    names = draw(st.lists(st.text(max_size=8), unique=True, max_size=5))
    extents = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    dtypes = st.sampled_from(list(DTYPES.values()))
    metas = {name: Meta(draw(extents), draw(dtypes)) for name in names}
    listings = []
    for step in draw(st.lists(st.integers(0, 1 << 40), max_size=3)):
        chunks = {}
        for name, meta in metas.items():
            offsets = tuple(draw(st.integers(0, extent - 1)) for extent in meta.shape)
            sizes = tuple(
                draw(st.integers(1, extent - offset))
                for offset, extent in zip(offsets, meta.shape, strict=True)
            )
            if draw(st.booleans()):
                chunks[name] = Chunk(offsets=offsets, sizes=sizes)
        elsewhere = frozenset(draw(st.lists(st.text(max_size=4), max_size=2))) - chunks.keys()
        values: dict[str, Any] = {"groups": [{"lr": draw(st.floats(allow_nan=False))}, None]}
        listings.append(ShardListing(step=step, chunks=chunks, values=values, elsewhere=elsewhere))
    return Inventory(metas=metas, listings=listings)


@given(announced())
@settings(max_examples=100, deadline=None)
def test_an_inventory_arrives_as_it_was_sent(sent: Inventory) -> None:
    """Covers names, shapes, dtypes, chunks, steps, and values to the last digit."""
    assert from_json(unpack(pack(to_json(sent)), 0), 0) == sent
    assert from_message(to_message(sent), 0) == sent


def test_an_inventory_leaves_out_empty_chunks_and_has_scalars() -> None:
    """Empty chunks are left out; scalars are included."""
    shards = {
        W: TensorShard(
            shape=(4, 3), chunk=Chunk(offsets=(1, 0), sizes=(2, 3)), tensor=torch.zeros(2, 3).half()
        ),
        "model.none": TensorShard(
            shape=(4,), chunk=Chunk(offsets=(4,), sizes=(0,)), tensor=torch.zeros(0)
        ),
        "optim.w/step": TensorShard.whole(torch.tensor(3)),
    }
    seen = inventory_of([StateShard(step=3, shards=shards, elsewhere=frozenset({"model.far"}))])
    assert seen.metas == {W: Meta((4, 3), torch.half), "optim.w/step": Meta((), torch.int64)}
    (listing,) = seen.listings
    assert (listing.step, listing.elsewhere) == (3, {"model.far"})
    assert listing.chunks == {W: shards[W].chunk, "optim.w/step": Chunk(offsets=(), sizes=())}


@pytest.mark.parametrize(
    ("other", "error"),
    [(torch.zeros(5), ShapeMismatch), (torch.zeros(4).double(), DtypeMismatch)],
)
def test_holdings_that_contradict_each_other_are_refused(
    other: torch.Tensor, error: type[Exception]
) -> None:
    """Applies to holdings of any steps."""
    held = [
        StateShard(step=step, shards={W: TensorShard.whole(tensor)})
        for step, tensor in enumerate((torch.zeros(4), other))
    ]
    with pytest.raises(error, match=W):
        inventory_of(held)


def test_a_dtype_that_cannot_travel_is_refused_by_name() -> None:
    """The error comes before anything is sent."""
    odd = torch.zeros(2, dtype=torch.uint16)
    with pytest.raises(UnsupportedOptimizer, match=r"model\.w.*uint16"):
        inventory_of([StateShard(step=0, shards={W: TensorShard.whole(odd)})])


def _listed(chunks: Any, *, table: Any = ((W, "float32", (4, 3)),), step: Any = 1) -> Any:
    return [json.dumps(table), [[step, {}, chunks, []]]]


MALFORMED: dict[str, Any] = {
    "no list": 7,
    "too short": [[]],
    "table no text": [[], []],
    "table no JSON": ["{", []],
    "unknown dtype": _listed([[], []], table=[[W, "quint8", [4]]]),
    "name no text": _listed([[], []], table=[[7, "float32", [4]]]),
    "negative extent": _listed([[], []], table=[[W, "float32", [-4]]]),
    "huge extent": _listed([[], []], table=[[W, "float32", [1 << 63]]]),
    "no extents": _listed([[], []], table=[[W, "float32", 4]]),
    "step no number": _listed([[], []], step="1"),
    "step a truth": _listed([[], []], step=True),
    "two boxes of one tensor": _listed([[0], [[[0, 0], [1, 3], [0]]]]),
    "number beyond the table": _listed([[1], []]),
    "number below zero": _listed([[-1], []]),
    "number twice": _listed([[0, 0], []]),
    "number no number": _listed([["0"], []]),
    "box beyond the tensor": _listed([[], [[[3, 0], [2, 3], [0]]]]),
    "box of other dimensions": _listed([[], [[[0], [4], [0]]]]),
    "empty box": _listed([[], [[[0, 0], [0, 3], [0]]]]),
    "offset below zero": _listed([[], [[[-1, 0], [2, 3], [0]]]]),
    "offsets and sizes differ": _listed([[], [[[0, 0], [4], [0]]]]),
    "elsewhere no names": [json.dumps([]), [[1, {}, [[], []], [7]]]],
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_inventories_are_refused_with_the_rank_that_sent_them(what: str) -> None:
    """Content from a peer is never trusted."""
    content = unpack(pack(MALFORMED[what]), 2)
    with pytest.raises(MalformedMessage, match="rank 2"):
        from_json(content, 2)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda message: message[:-3],
    "empty": lambda _: b"",
    "no compression": lambda _: b"[]",
    "no JSON": lambda _: zlib.compress(b"\xff\xfe{"),
    "too deep": lambda _: zlib.compress(b"[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("part", ["table", "listings"])
def test_a_damaged_message_is_refused(damage: Callable[[bytes], bytes], part: str) -> None:
    """The damage is in the table of names, after it, or in the table's length, which exceeds the
    message."""
    table, listings = zlib.compress(b'[["model.w","float32",[4]]]', 1), pack([])
    if part == "table":
        table = damage(table)
    else:
        listings = damage(listings)
    with pytest.raises(MalformedMessage, match="rank 1"):
        from_message(len(table).to_bytes(4, "big") + table + listings, 1)
    with pytest.raises(MalformedMessage, match="rank 1"):
        from_message((1 << 20).to_bytes(4, "big") + table, 1)


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_bytes_are_refused(what: str) -> None:
    """Compression and JSON are both checked."""
    with pytest.raises(MalformedMessage, match="rank 1"):
        unpack(DAMAGED[what](pack([1, 2, 3])), 1)


def test_a_message_that_decompresses_to_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The received message may be small."""
    monkeypatch.setattr(inventories, "MAX_TEXT_BYTES", 1 << 16)
    with pytest.raises(MalformedMessage, match="65536 bytes"):
        unpack(zlib.compress(b" " * (1 << 17)), 0)


def test_tensors_that_are_always_named_together_are_one_set() -> None:
    groups = [("a", "b", "c"), ("b", "c", "d"), ("a", "b", "c")]
    assert partition_names(groups) == {
        ("a", "b", "c"): [("a",), ("b", "c")],
        ("b", "c", "d"): [("b", "c"), ("d",)],
    }


def test_tensors_of_one_shape_share_their_holders() -> None:
    """Ranks hold rows of many tensors: the three million chunks that a thousand ranks have of a
    large model are those of a few shapes."""
    shapes = {
        f"model.{layer}.{shape[0]}": shape for layer in range(50) for shape in ((8, 2), (16,))
    }
    metas = {name: Meta(shape, torch.float32) for name, shape in shapes.items()}

    def rows(rank: int) -> dict[str, Chunk]:
        return {
            name: Chunk(
                offsets=(rank * shape[0] // 4, *[0] * (len(shape) - 1)),
                sizes=(shape[0] // 4, *shape[1:]),
            )
            for name, shape in shapes.items()
        }

    inventories = [
        Inventory(metas=metas, listings=[ShardListing(step=1, chunks=rows(r))]) for r in range(4)
    ]
    received = [from_message(to_message(each), rank) for rank, each in enumerate(inventories)]
    assert len({id(each.metas) for each in received}) == 1
    chosen = choose(received)
    assert len({id(holders) for holders in chosen.holders.values()}) == 2
    table, names = TensorTable(chosen.metas), list(chosen.metas)
    needs = chunks_from_json(chunks_to_json(rows(1), names, metas), table)
    assert needs == rows(1)
    assert len(groups_of(needs)) == 2
