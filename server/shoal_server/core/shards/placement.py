"""Cutting of parameters into shards, and placement of shards on servers. Deterministic.

Parameters are cut into blocks; blocks of one dtype and one parameter group are packed by size into
shards; shards are placed by size on the servers. The number of shards follows the size of the
model: about one for each 1.75 MiB, up to some hundreds. So a big model can be moved and balanced in
small parts, and a tiny model costs one message instead of hundreds. A very large model is cut into
some thousands of shards: if it had only hundreds, each would take long to move. Its blocks are
larger too, as the shard map has an entry for each block.
"""

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from shoal_proto.dtypes import DTYPE_BYTES

BLOCK_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a block in shards of up to 32 MiB. In larger shards, the maximum is an eighth of
a shard, rounded up to a multiple of this."""
TARGET_SHARD_BYTES = 1792 * 1024
"""Approximate bytes of a shard. A push costs some 0.2 ms for each shard of any size; a push of up
to 2 MiB is applied without a switch to another thread."""
MAX_SHARDS = 512
"""Maximum number of shards of a model of up to 128 GiB (shards of LARGE_SHARD_BYTES). The number
for each dtype and group is then rounded up (`cut_into_shards`), so the sum may be a little higher.
"""
LARGE_SHARD_BYTES = 256 * 1024 * 1024
MAX_LARGE_SHARDS = 4096
"""Maximum number of shards of a larger model, rounded up likewise. Shards of a model of more than
1 TiB exceed LARGE_SHARD_BYTES."""
BLOCKS_PER_SHARD = 8
"""Approximate minimum number of blocks in a shard, so that the packing is even."""
MIN_SPLIT_BYTES = 64 * 1024
"""Minimum bytes for each server, if the parameters of one dtype and group are split over the
servers. Fewer bytes become one shard: for a worker, one more request costs more than this many
bytes added to another request."""
MAX_MODEL_BYTES = 1 << 50
"""Maximum size of a model: more than any machine's memory, so a larger shape is a mistake."""
CUT_ELEMENTS = 64
"""Offsets of cuts are multiples of this, so that vector kernels round as in an uncut tensor."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int = 0

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive elements of one flattened parameter."""

    parameter: str
    offset: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Blocks of one dtype and group, one after the other in one flat tensor."""

    shard_id: int
    dtype: str
    group: int
    blocks: tuple[Block, ...]

    @property
    def num_bytes(self) -> int:
        return sum(block.num_elements for block in self.blocks) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class PlacedShard:
    shard: Shard
    server_id: str


class SchemaProblem(ValueError):
    """Raised for parameters that cannot be cut, with the value seen and the value expected."""

    def __init__(self, what: str, *, seen: str, expected: str) -> None:
        super().__init__(f"{what}; saw {seen}; expected {expected}")
        self.what = what
        self.seen = seen
        self.expected = expected


@dataclass(frozen=True, kw_only=True)
class SchemaDifference:
    """A parameter in which two schemas differ, described as in each schema; "(absent)" if a schema
    lacks it."""

    parameter: str
    seen: str
    expected: str


def check_schema(parameters: Sequence[Parameter]) -> None:
    """Raise SchemaProblem for a schema that cannot be placed."""
    if not any(p.num_elements for p in parameters):
        raise SchemaProblem("nothing to train", seen="no elements", expected="a parameter or more")
    seen_names = set()
    for p in parameters:
        if not p.name or p.name in seen_names:
            raise SchemaProblem(
                "parameter names must be unique", seen=repr(p.name), expected="each name once"
            )
        seen_names.add(p.name)
        if p.dtype not in DTYPE_BYTES:
            raise SchemaProblem(
                f"parameter {p.name} has a dtype that no optimizer kernel supports",
                seen=p.dtype,
                expected=" or ".join(DTYPE_BYTES),
            )
    total_bytes = sum(p.num_bytes for p in parameters)
    if total_bytes > MAX_MODEL_BYTES:
        largest = max(parameters, key=lambda p: p.num_bytes)
        raise SchemaProblem(
            "the model is too large",
            seen=f"{total_bytes} bytes; the largest is {_describe(largest)}, {largest.name[:100]}",
            expected=f"at most {MAX_MODEL_BYTES} bytes",
        )


def schema_digest(parameters: Iterable[Parameter]) -> str:
    """SHA-256, in hex, of names, shapes, dtypes and groups; independent of the order."""
    rows = sorted((p.name, list(p.shape), p.dtype, p.group) for p in parameters)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def find_differences(
    seen: Iterable[Parameter], expected: Iterable[Parameter]
) -> tuple[SchemaDifference, ...]:
    """Differences of two schemas, in order of parameter names."""
    of_seen = {p.name: _describe(p) for p in seen}
    of_expected = {p.name: _describe(p) for p in expected}
    return tuple(
        SchemaDifference(
            parameter=name,
            seen=of_seen.get(name, "(absent)"),
            expected=of_expected.get(name, "(absent)"),
        )
        for name in sorted(of_seen.keys() | of_expected.keys())
        if of_seen.get(name) != of_expected.get(name)
    )


def _describe(parameter: Parameter) -> str:
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    return f"{parameter.dtype} {shape} in group {parameter.group}"


def cut_into_shards(parameters: Sequence[Parameter], num_servers: int) -> tuple[Shard, ...]:
    """Shards of about equal size that together hold every element exactly once. The number of
    shards of each dtype and group is a multiple of `num_servers`, or 1 if there are too few bytes
    to be worth splitting. Call `check_schema` first.
    """
    total_bytes = sum(p.num_bytes for p in parameters)
    target_bytes = shard_bytes(total_bytes)
    alike: dict[tuple[str, int], list[Parameter]] = defaultdict(list)
    for p in parameters:
        if p.num_elements:
            alike[p.dtype, p.group].append(p)
    shards: list[Shard] = []
    for (dtype, group), same_kind in sorted(alike.items()):
        num_bytes = sum(p.num_bytes for p in same_kind)
        num_shards = _round_up(-(-num_bytes // target_bytes), num_servers)
        if num_bytes < MIN_SPLIT_BYTES * num_servers:
            num_shards = 1
        wish_bytes = num_bytes // (num_shards * BLOCKS_PER_SHARD)
        blocks = _cut_into_blocks(same_kind, wish_bytes, max_block_bytes(total_bytes))
        bins = _pack(blocks, [b.num_elements for b in blocks], [0] * num_shards)
        for packed in filter(None, bins):
            in_order = sorted(packed, key=lambda b: (b.parameter, b.offset))
            shards.append(
                Shard(shard_id=len(shards), dtype=dtype, group=group, blocks=tuple(in_order))
            )
    return tuple(shards)


def shard_bytes(total_bytes: int) -> int:
    """Approximate size of the shards of a model of `total_bytes`."""
    few = max(TARGET_SHARD_BYTES, -(-total_bytes // MAX_SHARDS))
    if few <= LARGE_SHARD_BYTES:
        return few
    return max(LARGE_SHARD_BYTES, -(-total_bytes // MAX_LARGE_SHARDS))


def max_block_bytes(total_bytes: int) -> int:
    """Maximum size of a block, in a model of `total_bytes`."""
    return _round_up(shard_bytes(total_bytes) // BLOCKS_PER_SHARD, BLOCK_BYTES) or BLOCK_BYTES


def place(
    shards: Sequence[Shard], server_ids: Iterable[str], turn: int = 0
) -> tuple[PlacedShard, ...]:
    """Place each shard on the server with the least load so far, biggest shards first.

    `turn`: any number. It chooses the first server, so that jobs with fewer shards than servers do
    not all begin with the same server.
    """
    servers = sorted(server_ids)
    if len(shards) < len(servers):
        turn %= len(servers)
        servers = servers[turn:] + servers[:turn]
    chosen = least_loaded({shard.shard_id: shard.num_bytes for shard in shards}, servers, {})
    return tuple(
        PlacedShard(shard=shard, server_id=chosen[shard.shard_id])
        for shard in sorted(shards, key=lambda shard: shard.shard_id)
    )


def least_loaded(
    num_bytes: Mapping[int, int], servers: Sequence[S], loads: Mapping[S, int]
) -> dict[int, S]:
    """Choose a server for each shard, biggest shards first: the one with the least load so far, and
    of equal ones the first. `num_bytes`: size of each shard by its id. `loads`: bytes that servers
    have already."""
    shards = sorted(num_bytes)
    sizes = [num_bytes[shard_id] for shard_id in shards]
    packed = _pack(shards, sizes, [loads.get(server, 0) for server in servers])
    return {
        shard_id: server for server, held in zip(servers, packed, strict=True) for shard_id in held
    }


def spread_tables(
    num_shards: Mapping[str, int], server_ids: Iterable[str]
) -> tuple[tuple[str, int, str], ...]:
    """Place the shards of all tables on the servers in turn; return (table, index of the shard in
    its table, server id) for each.

    The number of rows is not known in advance, but rows spread evenly over a table's shards.
    """
    servers = sorted(server_ids)
    wanted = [(table, index) for table in sorted(num_shards) for index in range(num_shards[table])]
    return tuple(
        (table, index, servers[turn % len(servers)]) for turn, (table, index) in enumerate(wanted)
    )


def skew(placed: Sequence[PlacedShard], num_servers: int) -> float:
    """Bytes on the fullest server divided by the mean of all servers; 1.0 is perfectly even."""
    load: dict[str, int] = defaultdict(int)
    for p in placed:
        load[p.server_id] += p.shard.num_bytes
    return max(load.values()) * num_servers / sum(load.values())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cut_into_blocks(
    parameters: Sequence[Parameter], wish_bytes: int, most_bytes: int
) -> list[Block]:
    blocks = []
    for p in parameters:
        limit_bytes = min(most_bytes, max(wish_bytes, 1))
        limit = _round_up(-(-limit_bytes // DTYPE_BYTES[p.dtype]), CUT_ELEMENTS)
        limit = min(limit, most_bytes // DTYPE_BYTES[p.dtype])
        for offset in range(0, p.num_elements, limit):
            size = min(limit, p.num_elements - offset)
            blocks.append(Block(parameter=p.name, offset=offset, num_elements=size))
    return blocks


def _pack(items: Sequence[T], sizes: Sequence[int], loads: Sequence[int]) -> list[list[T]]:
    """Put each item into the emptiest bin, largest items first (Graham 1969). `loads`: size that
    each bin has already. If all are 0, no bin is more than one item above the mean.
    """
    bins: list[list[T]] = [[] for _ in loads]
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in sorted(range(len(items)), key=lambda i: (-sizes[i], i)):
        load, index = heapq.heappop(heap)
        bins[index].append(items[i])
        heapq.heappush(heap, (load + sizes[i], index))
    return bins
