"""Layout of a job's parameters in its shards, with copying."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shoal_proto.checksum import verify
from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import MalformedMessage, ShapeMismatch
from shoal_proto.pieces import AnyPiece
from shoal_proto.v1.shards_pb2 import Shard, ShardMap

Buffers = Mapping[str, memoryview]
"""Elements of each parameter as flat bytes (`memoryview.cast("B")`), by name."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A block: `num_bytes` from `start` in the shard lie at `offset` in the parameter."""

    start: int
    parameter: str
    offset: int
    num_bytes: int


class ShardBlocks:
    """The blocks of one shard, in bytes."""

    def __init__(self, shard: Shard) -> None:
        self.shard_id = shard.shard_id
        size = DTYPE_BYTES[shard.dtype]
        runs = []
        start = 0
        for block in shard.blocks:
            num_bytes = block.num_elements * size
            runs.append(_Run(start, block.parameter, block.offset * size, num_bytes))
            start += num_bytes
        self.num_bytes = start
        self._runs = runs
        self._starts = [run.start for run in runs]

    def absent(self, buffers: Buffers) -> list[int]:
        """Indexes of the blocks whose parameter has no buffer."""
        return [i for i, run in enumerate(self._runs) if run.parameter not in buffers]

    def gather(
        self, buffers: Buffers, piece_bytes: int
    ) -> Iterator[tuple[int, Sequence[memoryview]]]:
        """Yield (offset, parts) of pieces that together contain every block with a buffer, in
        order. The parts of a piece are consecutive in the shard. They are views of `buffers`."""
        parts: list[memoryview] = []
        held = start = 0
        for run in self._runs:
            source = buffers.get(run.parameter)
            if source is None:
                if parts:
                    yield start, parts
                    parts, held = [], 0
                continue
            done = 0
            while done < run.num_bytes:
                if not parts:
                    start = run.start + done
                size = min(run.num_bytes - done, piece_bytes - held)
                parts.append(source[run.offset + done : run.offset + done + size])
                done += size
                held += size
                if held == piece_bytes:
                    yield start, parts
                    parts, held = [], 0
        if parts:
            yield start, parts

    def scatter(self, piece: AnyPiece, buffers: Buffers) -> int:
        """Write a piece's bytes into the parameters' buffers; return the number of bytes. Raises
        ChecksumMismatch or MalformedMessage."""
        data = memoryview(piece.data)
        verify(f"a piece of shard {self.shard_id}", piece.checksum, data)
        position, stop = piece.offset_bytes, piece.offset_bytes + len(data)
        if stop > self.num_bytes:
            raise MalformedMessage(
                f"a piece reaches beyond shard {self.shard_id}",
                seen=f"bytes {position} to {stop}",
                expected=f"at most {self.num_bytes}",
            )
        index = bisect_right(self._starts, position) - 1
        taken = 0
        while taken < len(data):
            run = self._runs[index]
            within = position + taken - run.start
            size = min(run.num_bytes - within, len(data) - taken)
            at = run.offset + within
            buffers[run.parameter][at : at + size] = data[taken : taken + size]
            taken += size
            index += 1
        return taken


def check_buffers(shard_map: ShardMap, buffers: Buffers, *, complete: bool, writable: bool) -> None:
    """Raise ShapeMismatch unless each buffer is one of the job's parameters, whole and flat.
    `complete`: each parameter with elements needs one. `writable`: none is read-only."""
    sizes = {p.name: prod(p.shape) * DTYPE_BYTES[p.dtype] for p in shard_map.parameters}
    for name, buffer in buffers.items():
        if name not in sizes:
            raise ShapeMismatch(
                f"job {shard_map.job} has no parameter {name}",
                seen=name,
                expected=f"one of its {len(sizes)} parameters",
            )
        if buffer.nbytes != sizes[name] or buffer.format != "B" or buffer.ndim != 1:
            raise ShapeMismatch(
                f"the buffer of parameter {name} has another size or format",
                seen=f"{buffer.nbytes} bytes (format {buffer.format!r}, {buffer.ndim}-d)",
                expected=f"{sizes[name]} bytes (format 'B', 1-d)",
                fix="Compare shape and dtype with the job's.",
            )
        if writable and buffer.readonly:
            raise ShapeMismatch(
                f"the buffer of parameter {name} cannot be written to",
                seen="a read-only buffer",
                expected="a writable one",
            )
    missing = sorted(name for name, size in sizes.items() if size and name not in buffers)
    if complete and missing:
        raise ShapeMismatch(
            f"a buffer is needed for each parameter of job {shard_map.job}",
            seen=f"none for {', '.join(missing[:8])}",
            expected=f"{len(sizes)} buffers",
        )
