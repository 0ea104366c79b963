"""Inventories: descriptions of the state that each rank holds, without contents of tensors. Ranks
exchange them as compressed JSON, and check all sizes and numbers."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from shoal.state.shards import DTYPES, Chunk, GroupedChunks, Json, Names, StateShard
from shoal_proto.deflated import inflate
from shoal_proto.errors import DtypeMismatch, MalformedMessage, ShapeMismatch, UnsupportedOptimizer

MAX_TEXT_BYTES = 64 * 1024 * 1024
"""Limit of one message after decompression; a thousand tensors take about 100 KiB."""
MAX_DIMENSIONS = 64
MAX_PICKED = 4096
"""Number of groups of tensors that a table caches."""
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of one tensor of the state, the same on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class ShardListing:
    """Description of one state shard, without the contents of its tensors."""

    step: int
    chunks: Mapping[str, Chunk]
    """Chunks by name of the tensor; none is empty."""
    values: Mapping[str, Json] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Description of everything that one rank holds."""

    metas: Mapping[str, Meta]
    listings: Sequence[ShardListing]


def inventory_of(held: Sequence[StateShard]) -> Inventory:
    """Return the inventory of these state shards, of any steps. Raises ShapeMismatch or
    DtypeMismatch if they contradict each other, and UnsupportedOptimizer for a dtype that cannot be
    sent."""
    metas: dict[str, Meta] = {}
    listings = []
    for state_shard in held:
        chunks = {}
        for name, shard in state_shard.shards.items():
            if not shard.chunk.num_elements:
                continue
            meta = Meta(tuple(shard.shape), shard.tensor.dtype)
            if str(meta.dtype).removeprefix("torch.") not in DTYPES:
                raise UnsupportedOptimizer(
                    f"{name} cannot be handed to another member",
                    seen=str(meta.dtype),
                    expected=", ".join(DTYPES),
                )
            add_meta(metas, name, meta)
            chunks[name] = shard.chunk
        listings.append(
            ShardListing(
                step=state_shard.step,
                chunks=chunks,
                values=state_shard.values,
                elsewhere=state_shard.elsewhere,
            )
        )
    return Inventory(metas=metas, listings=listings)


def add_meta(metas: dict[str, Meta], name: str, meta: Meta) -> None:
    """Record a tensor's meta. Raises ShapeMismatch or DtypeMismatch if another was recorded."""
    known = metas.setdefault(name, meta)
    if known.shape != meta.shape:
        raise ShapeMismatch(
            f"members hold {name} in different shapes", seen=f"{meta.shape} and {known.shape}"
        )
    if known.dtype != meta.dtype:
        raise DtypeMismatch(
            f"members hold {name} in different dtypes", seen=f"{meta.dtype} and {known.dtype}"
        )


# --- as bytes ---


def pack(content: Json) -> bytes:
    """Encode the content as a message."""
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 1)


def unpack(message: bytes, rank: int) -> Any:
    """Decode a message that `rank` sent; the content is not validated. Raises MalformedMessage."""
    try:
        return json.loads(inflate(message, MAX_TEXT_BYTES))
    except (ValueError, RecursionError) as error:
        raise malformed(rank, f"{type(error).__name__}: {error}") from error


def malformed(rank: int, seen: str) -> MalformedMessage:
    return MalformedMessage(
        f"rank {rank} sent a message that is not an inventory of its state",
        seen=seen,
        expected="an inventory as a member of the same version of Shoal sends it",
    )


def to_message(inventory: Inventory) -> bytes:
    """Encode the inventory as a message: the size of the compressed table (4 bytes, big-endian),
    the compressed table, and the compressed listings (see `to_json`). The table is compressed
    separately: ranks with the same table send the same bytes, which a receiver decodes once."""
    table, listings = _to_json(inventory)
    head = zlib.compress(table.encode(), 1)
    return len(head).to_bytes(_LENGTH_BYTES, "big") + head + pack(listings)


def from_message(message: bytes, rank: int) -> Inventory:
    """Decode an inventory that `to_message` encoded. Raises MalformedMessage."""
    start = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "big")
    if start > len(message):
        raise malformed(rank, f"{len(message)} bytes, but a table that ends at {start}")
    try:
        table = _packed_table(message[_LENGTH_BYTES:start])
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise malformed(rank, f"{type(error).__name__}: {error}") from error
    return _inventory(table, unpack(message[start:], rank), rank)


@lru_cache(maxsize=4)
def _packed_table(head: bytes) -> "TensorTable":
    return _table(inflate(head, MAX_TEXT_BYTES).decode())


def to_json(inventory: Inventory) -> Json:
    """Convert the inventory to [table, listings]. The table is a JSON text, with a row [name,
    dtype, shape] for each tensor. Each listing is [step, values, chunks, names elsewhere]; its
    chunks refer to tensors by row."""
    return list[Json](_to_json(inventory))


def _to_json(inventory: Inventory) -> tuple[str, list[Json]]:
    names = list(inventory.metas)
    table = [
        [name, str(meta.dtype).removeprefix("torch."), list(meta.shape)]
        for name, meta in inventory.metas.items()
    ]
    listings: list[Json] = [
        [
            listing.step,
            dict(listing.values),
            chunks_to_json(listing.chunks, names, inventory.metas),
            list[Json](sorted(listing.elsewhere - listing.chunks.keys())),
        ]
        for listing in inventory.listings
    ]
    return json.dumps(table, separators=(",", ":")), listings


def from_json(content: Any, rank: int) -> Inventory:
    """Decode an inventory that `to_json` encoded. Raises MalformedMessage."""
    try:
        table, listings = content
        known = _table(_text(table))
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise malformed(rank, f"{type(error).__name__}: {error}") from error
    return _inventory(known, listings, rank)


def _inventory(table: "TensorTable", listings: Any, rank: int) -> Inventory:
    try:
        return Inventory(
            metas=table.metas,
            listings=[
                ShardListing(
                    step=_lengths([step])[0],
                    values=dict(values),
                    chunks=chunks_from_json(chunks, table),
                    elsewhere=frozenset(_text(name) for name in elsewhere),
                )
                for step, values, chunks, elsewhere in listings
            ],
        )
    except (TypeError, ValueError, LookupError, RecursionError) as error:
        raise malformed(rank, f"{type(error).__name__}: {error}") from error


class TensorTable:
    """Table of tensors, in which messages refer to a tensor by its number."""

    def __init__(self, metas: Mapping[str, Meta]) -> None:
        self.metas = metas
        self._names = list(metas)
        self._picked: dict[tuple[int, ...], Mapping[tuple[int, ...], Names]] = {}

    def pick(self, numbers: Sequence[Any]) -> Mapping[tuple[int, ...], Names]:
        """Return the names of the tensors with these numbers, by shape. Raises ValueError,
        TypeError or LookupError for invalid numbers."""
        key = tuple(numbers)
        names_by_shape = self._picked.get(key)
        if names_by_shape is None:
            names_by_shape = self._by_shape(key)
            if len(self._picked) < MAX_PICKED:
                self._picked[key] = names_by_shape
        return names_by_shape

    def _by_shape(self, numbers: tuple[int, ...]) -> Mapping[tuple[int, ...], Names]:
        if numbers and (min(numbers) < 0 or len(set(numbers)) < len(numbers)):
            raise ValueError("a negative number, or the same number twice")
        names_by_shape: dict[tuple[int, ...], list[str]] = {}
        for number in numbers:
            name = self._names[number]
            names_by_shape.setdefault(self.metas[name].shape, []).append(name)
        return {shape: tuple(names) for shape, names in names_by_shape.items()}


@lru_cache(maxsize=4)
def _table(text: str) -> TensorTable:
    return TensorTable(
        MappingProxyType(
            {
                _text(name): Meta(_lengths(shape), DTYPES[dtype])
                for name, dtype, shape in json.loads(text)
            }
        )
    )


def chunks_to_json(
    chunks: Mapping[str, Chunk], names: Sequence[str], metas: Mapping[str, Meta]
) -> Json:
    """Encode chunks as [indexes of whole tensors, [[offsets, sizes, indexes], ...]]. The indexes
    are those of the tensors in `names`."""
    whole: list[Json] = []
    cut: dict[Chunk, list[Json]] = {}
    for index, name in enumerate(names):
        chunk = chunks.get(name)
        if chunk is not None and chunk.sizes == metas[name].shape:
            whole.append(index)
        elif chunk is not None:
            cut.setdefault(chunk, []).append(index)
    parts: list[Json] = [
        [list(chunk.offsets), list(chunk.sizes), indexes] for chunk, indexes in cut.items()
    ]
    return [whole, parts]


def chunks_from_json(content: Any, table: TensorTable) -> GroupedChunks:
    """Decode chunks that `chunks_to_json` encoded. Raises ValueError, TypeError or LookupError."""
    whole, cut = content
    groups = [(Chunk.whole(shape), names) for shape, names in table.pick(whole).items()]
    for offsets, sizes, numbers in cut:
        chunk = Chunk(offsets=_lengths(offsets), sizes=_lengths(sizes))
        for shape, names in table.pick(numbers).items():
            if not _fits(chunk, shape):
                raise ValueError(f"{chunk} of {names[0]}, whose shape is {shape}")
            groups.append((chunk, names))
    if len(set().union(*(names for _, names in groups))) < sum(len(names) for _, names in groups):
        raise ValueError("two chunks of one tensor")
    return GroupedChunks(groups)


def _fits(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(chunk.offsets) == len(chunk.sizes) and all(
        size and offset + size <= extent
        for offset, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not a valid name")
    return value


def _lengths(values: Iterable[Any]) -> tuple[int, ...]:
    lengths = tuple(values)
    if len(lengths) > MAX_DIMENSIONS:
        raise ValueError(f"{len(lengths)} dimensions")
    for value in lengths:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"{value!r:.100} is not a size")
    return lengths
