"""Cutting of parameters into shards, and their placement on servers.

Parameters are cut into blocks, blocks of one dtype and group are packed by size into shards, and
shards are placed by size. A model gets about one shard for each 1.75 MiB, up to some hundreds:
parts of big models can be moved, and tiny ones cost few messages. A very large model gets some
thousands, as very large shards take long to move.
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
"""Maximum bytes of a block in shards of up to 32 MiB. In larger shards it is an eighth of the
shard, rounded up to a multiple of this."""
TARGET_SHARD_BYTES = 1792 * 1024
"""Approximate bytes of a shard. Each shard of a push costs some 0.2 ms; up to 2 MiB are applied
without a switch to another thread."""
MAX_SHARDS = 512
"""Maximum number of shards of a model of up to 128 GiB. The number for each dtype and group is then
rounded up, so there may be a few further shards."""
LARGE_SHARD_BYTES = 256 * 1024 * 1024
MAX_LARGE_SHARDS = 4096
"""Maximum number of shards of a larger model, rounded up likewise. Above 1 TiB, shards exceed
LARGE_SHARD_BYTES."""
BLOCKS_PER_SHARD = 8
"""Approximate minimum of blocks in a shard, for even packing."""
MIN_SPLIT_BYTES = 64 * 1024
"""Minimum bytes per server for splitting the parameters of one dtype and group over servers. Fewer
bytes become one shard: a further request costs a worker more than these bytes in another request.
"""
MAX_MODEL_BYTES = 1 << 50
"""Maximum size of a model, above any machine's memory: a larger shape is a mistake."""
CUT_ELEMENTS = 64
"""Cuts are at multiples of this, so that vector kernels round as in an uncut tensor."""

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
    """Consecutive elements of a flattened parameter."""

    parameter: str
    offset: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Blocks of one dtype and group, concatenated in a flat tensor."""

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
    """Raised for parameters that cannot be cut."""

    def __init__(self, what: str, *, seen: str, expected: str) -> None:
        super().__init__(f"{what}; saw {seen}; expected {expected}")
        self.what = what
        self.seen = seen
        self.expected = expected


@dataclass(frozen=True, kw_only=True)
class SchemaDifference:
    """A parameter that differs between schemas, as described in each; "(absent)" where missing."""

    parameter: str
    seen: str
    expected: str


def check_schema(parameters: Sequence[Parameter]) -> None:
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
    """SHA-256, in hex, of names, shapes, dtypes and groups, in any order."""
    rows = sorted((p.name, list(p.shape), p.dtype, p.group) for p in parameters)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def find_differences(
    seen: Iterable[Parameter], expected: Iterable[Parameter]
) -> tuple[SchemaDifference, ...]:
    """Differences of two schemas, by parameter name."""
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
    """Shards of about equal size that hold every element exactly once. Their number for each dtype
    and group is a multiple of `num_servers`, or 1 for few bytes. Call `check_schema` first."""
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
    few = max(TARGET_SHARD_BYTES, -(-total_bytes // MAX_SHARDS))
    if few <= LARGE_SHARD_BYTES:
        return few
    return max(LARGE_SHARD_BYTES, -(-total_bytes // MAX_LARGE_SHARDS))


def max_block_bytes(total_bytes: int) -> int:
    return _round_up(shard_bytes(total_bytes) // BLOCKS_PER_SHARD, BLOCK_BYTES) or BLOCK_BYTES


def place(
    shards: Sequence[Shard], server_ids: Iterable[str], turn: int = 0
) -> tuple[PlacedShard, ...]:
    """Place each shard on the server with the least load so far, biggest first.

    `turn`: any number; it chooses the first server, so that small jobs begin with different
    servers.
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
    """Choose the least loaded server for each shard, biggest first; of equal ones the first.
    `num_bytes`: sizes by shard id. `loads`: bytes that servers hold already."""
    shards = sorted(num_bytes)
    sizes = [num_bytes[shard_id] for shard_id in shards]
    packed = _pack(shards, sizes, [loads.get(server, 0) for server in servers])
    return {
        shard_id: server for server, held in zip(servers, packed, strict=True) for shard_id in held
    }


def spread_tables(
    num_shards: Mapping[str, int], server_ids: Iterable[str]
) -> tuple[tuple[str, int, str], ...]:
    """Place the shards of all tables on servers in turn, as (table, index of the shard, server id).

    Rows spread evenly over a table's shards, so the number of rows does not matter.
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
    """Put each item into the emptiest bin, largest first (Graham 1969). `loads`: sum of the sizes
    that each bin holds already. If all are 0, no bin ends more than one item above the mean."""
    bins: list[list[T]] = [[] for _ in loads]
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in sorted(range(len(items)), key=lambda i: (-sizes[i], i)):
        load, index = heapq.heappop(heap)
        bins[index].append(items[i])
        heapq.heappush(heap, (load + sizes[i], index))
    return bins
