"""Tensors from a version's bytes: the whole model, or the slices of a reader's own layout.

Segments are staged and verified before tensors are read from them.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.layouts.base import shard_of
from shoal.state.shards import DTYPES, Chunk, TensorShard
from shoal.weights.rows import PublishedRows, tables_of
from shoal_client.weights.cut_parts import TABLES
from shoal_proto.errors import DtypeMismatch, InvalidSpec, MalformedMessage, ShapeMismatch
from shoal_proto.short_lists import short_list
from shoal_proto.v1 import weights_pb2

Target = Mapping[str, Tensor] | nn.Module
"""Target of an installation: tensors by name, DTensors among them, or a module."""
_PACKED = (torch.float4_e2m1fn_x2,)
"""Floating point dtypes into which torch converts no values."""
MAX_THREADS = 4
THREAD_BYTES = 32 * 1024 * 1024
"""Minimum number of bytes for each writing thread."""
NAMED = 5


@dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """A rectangular part of a tensor, contiguous in a segment."""

    chunk: Chunk
    segment: int
    at: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a version, and the positions of its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: Sequence[StoredSlice]

    def view(self, part: StoredSlice, segments: Mapping[int, Tensor]) -> Tensor:
        num_bytes = part.chunk.num_elements * self.dtype.itemsize
        raw = segments[part.segment][part.at : part.at + num_bytes]
        return raw.view(self.dtype).view(part.chunk.sizes)

    def read(self, segments: Mapping[int, Tensor]) -> Tensor:
        """Return the tensor: a view of its segment if possible, else a copy."""
        if len(self.slices) == 1:
            return self.view(self.slices[0], segments)
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, Chunk.whole(self.shape), segments)
        return whole

    def read_into(self, target: Tensor, chunk: Chunk, segments: Mapping[int, Tensor]) -> None:
        """Copy this chunk of the tensor into a target of the same sizes, in the target's dtype.

        If the target requires a gradient, grad mode must be off.
        """
        if len(self.slices) == 1 and self.slices[0].chunk == chunk:
            target.copy_(self.view(self.slices[0], segments))
            return
        for part in self.slices:
            common = part.chunk.overlap(chunk)
            if common is not None:
                source = self.view(part, segments)[common.slices_in(part.chunk)]
                target[common.slices_in(chunk)].copy_(source)


class VersionLayout:
    """Positions of a version's tensors in its segments.

    Raises MalformedMessage if a dtype is unknown, a name occurs twice, a slice exceeds its tensor
    or its segment or is not aligned, or if elements are missing or occur twice.
    """

    def __init__(self, layout: weights_pb2.Layout) -> None:
        self.segment_bytes: Sequence[int] = tuple(layout.segment_bytes)
        slices: list[list[StoredSlice]] = [[] for _ in layout.tensors]
        specs = [_checked_spec(each) for each in layout.tensors]
        for each in layout.slices:
            if each.tensor >= len(specs):
                raise _malformed(f"a slice of tensor {each.tensor} of {len(specs)}")
            name, dtype, shape = specs[each.tensor]
            slices[each.tensor].append(self._checked_slice(each, name, dtype, shape))
        tensors = {
            name: StoredTensor(name=name, dtype=dtype, shape=shape, slices=tensor_slices)
            for (name, dtype, shape), tensor_slices in zip(specs, slices, strict=True)
        }
        if len(tensors) < len(specs):
            raise _malformed("a name twice")
        for tensor in tensors.values():
            _check_coverage(tensor)
        self.tables = {n: each for n, each in tensors.items() if n.startswith(TABLES)}
        """Columns of embedding tables by name; empty in a version without tables."""
        self.tensors: Mapping[str, StoredTensor] = {
            name: each for name, each in tensors.items() if name not in self.tables
        }

    def _checked_slice(
        self, given: weights_pb2.Slice, name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> StoredSlice:
        chunk = Chunk.whole(shape)
        if given.offsets or given.sizes:
            chunk = Chunk(offsets=tuple(given.offsets), sizes=tuple(given.sizes))
            if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
                raise _malformed(f"a slice of {name} with other dimensions than {shape}")
            ends = (o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            if any(end > extent for end, extent in zip(ends, shape, strict=True)):
                raise _malformed(f"a slice of {name} beyond {shape}: {chunk}")
        end = given.at + math.prod(chunk.sizes) * dtype.itemsize
        if given.segment >= len(self.segment_bytes) or end > self.segment_bytes[given.segment]:
            raise _malformed(f"a slice of {name} beyond its segment, {given.segment}")
        if given.at % dtype.itemsize:
            raise _malformed(f"a slice of {name} at byte {given.at}, for {dtype}")
        return StoredSlice(chunk=chunk, segment=given.segment, at=given.at)

    def segments_of(self, *, tables: bool) -> list[int]:
        """Return the segments that hold parts of the model; with `tables`, all segments."""
        if tables or not self.tables:
            return list(range(len(self.segment_bytes)))
        parts = (part for each in self.tensors.values() for part in each.slices)
        return sorted({part.segment for part in parts})

    def ranges_of(self, wanted: Mapping[str, Chunk]) -> dict[int, list[tuple[int, int]]]:
        """Return the byte ranges (start, stop) that hold these chunks, by segment.

        A range covers a slice's rows from the first wanted row to the last.
        """
        ranges: dict[int, list[tuple[int, int]]] = {}
        for name, chunk in wanted.items():
            tensor = self.tensors[name]
            for part in tensor.slices:
                common = part.chunk.overlap(chunk)
                if common is not None:
                    byte_range = _bytes_of(part, common, tensor.dtype.itemsize)
                    ranges.setdefault(part.segment, []).append(byte_range)
        return ranges


def _bytes_of(part: StoredSlice, common: Chunk, item_bytes: int) -> tuple[int, int]:
    if not part.chunk.sizes:
        return part.at, part.at + item_bytes
    row_bytes = math.prod(part.chunk.sizes[1:]) * item_bytes
    first = common.offsets[0] - part.chunk.offsets[0]
    return part.at + first * row_bytes, part.at + (first + common.sizes[0]) * row_bytes


class Installation:
    """A reader's tensors, into which a version is to be written.

    The constructor checks all tensors before any is changed. Raises InvalidSpec if names differ, a
    value is not a tensor that can be written, or a DTensor has an unsupported placement;
    ShapeMismatch or DtypeMismatch if a tensor cannot hold the published one.
    """

    def __init__(self, layout: VersionLayout, into: Target) -> None:
        self._layout = layout
        self._shards = {name: _own_shard(name, tensor) for name, tensor in _tensors(into).items()}
        _check_names(set(layout.tensors), set(self._shards))
        for name, shard in self._shards.items():
            _check_fits(layout.tensors[name], shard)
        self._tied = _tied(self._shards)

    @property
    def ranges(self) -> dict[int, list[tuple[int, int]]] | None:
        """Byte ranges to fetch for the reader's slices, by segment; None if all are whole."""
        if all(each.chunk.sizes == tuple(each.shape) for each in self._shards.values()):
            return None
        return self._layout.ranges_of({name: each.chunk for name, each in self._shards.items()})

    def write(self, segments: Mapping[int, Tensor]) -> None:
        """Install the version: write all tensors, from verified segments. Raises InvalidSpec before
        any is changed if two of them are one tensor here and differ in the version."""
        for names in self._tied:
            _check_equal(names, {name: self._published(name, segments) for name in names})
        shares = _shares(self._shards)
        with ThreadPoolExecutor(len(shares), thread_name_prefix="shoal-install") as pool:
            others = [pool.submit(self._write, names, segments) for names in shares[1:]]
            self._write(shares[0], segments)
        for each in others:
            each.result()

    def _published(self, name: str, segments: Mapping[int, Tensor]) -> Tensor:
        stored, chunk = self._layout.tensors[name], self._shards[name].chunk
        if len(stored.slices) == 1 and stored.slices[0].chunk == chunk:
            return stored.view(stored.slices[0], segments)
        values = torch.empty(chunk.sizes, dtype=stored.dtype)
        stored.read_into(values, chunk, segments)
        return values

    @torch.no_grad()
    def _write(self, names: Sequence[str], segments: Mapping[int, Tensor]) -> None:
        for name in names:
            shard, stored = self._shards[name], self._layout.tensors[name]
            if shard.tensor.is_inference() == torch.is_inference_mode_enabled():
                stored.read_into(shard.tensor, shard.chunk, segments)
            else:
                # A tensor made in inference mode can be written in that mode only.
                with torch.inference_mode(shard.tensor.is_inference()), torch.no_grad():
                    stored.read_into(shard.tensor, shard.chunk, segments)


def _shares(shards: Mapping[str, TensorShard]) -> list[list[str]]:
    """Divide the tensors among threads, about equally in bytes.

    The first share, for the caller's thread, has tensors on GPUs and of subclasses, as writing them
    may depend on the thread's state, and tensors that share memory, which are written in order.
    """
    threads = min(len(os.sched_getaffinity(0)) // torch.get_num_threads(), MAX_THREADS)
    plain = {name: shard.tensor for name, shard in shards.items() if _is_plain(shard.tensor)}
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in plain.values())
    names = [name for name, each in plain.items() if users[each.untyped_storage().data_ptr()] == 1]
    num_bytes = sum(shards[name].tensor.nbytes for name in names)
    threads = max(min(threads, num_bytes // THREAD_BYTES), 1)
    shares: list[list[str]] = [[] for _ in range(threads)]
    done_bytes = 0
    for name in names:
        # A last tensor without bytes would be beyond the last share.
        shares[min(done_bytes * threads // max(num_bytes, 1), threads - 1)].append(name)
        done_bytes += shards[name].tensor.nbytes
    divided = set(names)
    shares[0] += [name for name in shards if name not in divided]
    return shares


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and type(tensor) in (Tensor, nn.Parameter)


def _tied(shards: Mapping[str, TensorShard]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, shard in shards.items():
        tensor = shard.tensor
        if tensor.numel():
            names.setdefault((tensor.device, tensor.data_ptr(), *tensor.stride()), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_equal(names: Sequence[str], published: Mapping[str, Tensor]) -> None:
    first = names[0]
    for name in names[1:]:
        one, other = published[first], published[name]
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise InvalidSpec(
                f"{first} and {name} are one tensor here, and differ in the version",
                seen="a model that ties them",
                expected="a model with a tensor for each, as the publisher has",
                fix="Untie them (Hugging Face: tie_word_embeddings=False), or fetch without into=.",
            )


def write_common(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> list[str]:
    """Write a version's tensors into tensors of the same names; return the names that the version
    lacks.

    Of a DTensor, this rank's slice is written. Raises what `Installation` raises, before any tensor
    is changed.
    """
    shards = {name: _own_shard(name, into[name]) for name in into if name in tensors}
    for name, shard in shards.items():
        given = tensors[name]
        stored = StoredTensor(name=name, dtype=given.dtype, shape=tuple(given.shape), slices=())
        _check_fits(stored, shard)
    for names in _tied(shards):
        _check_equal(names, {name: tensors[name] for name in names})
    for name, shard in shards.items():
        part = shard.chunk.slices_in(Chunk.whole(tensors[name].shape))
        with torch.inference_mode(shard.tensor.is_inference()):
            shard.tensor.copy_(tensors[name][part])
    return sorted(into.keys() - tensors.keys())


def _tensors(into: Target) -> dict[str, Tensor]:
    held = into.state_dict(keep_vars=True) if isinstance(into, nn.Module) else into
    tensors = {}
    for name, tensor in held.items():
        if not isinstance(tensor, Tensor):
            raise InvalidSpec(
                f"the version cannot be written to {name}",
                seen=type(tensor).__name__,
                expected="a tensor",
            )
        tensors[name] = tensor
    return tensors


def _own_shard(name: str, tensor: Tensor) -> TensorShard:
    if isinstance(tensor, DTensor):
        for placement in tensor.placements:
            if type(placement) not in (Shard, Replicate):
                raise InvalidSpec(
                    f"{name} has a placement whose slices Shoal cannot name",
                    seen=str(placement),
                    expected="Shard(dim) or Replicate() in each dimension of the mesh",
                )
    shard = shard_of(tensor)
    _check_writable(name, shard.tensor)
    return shard


def _check_writable(name: str, tensor: Tensor) -> None:
    """Raise InvalidSpec for a tensor whose elements cannot all be written."""
    reason = ""
    if tensor.is_meta:
        reason = "is on the meta device, which has no memory"
    elif tensor.layout is not torch.strided:
        reason = f"is {str(tensor.layout).removeprefix('torch.')}"
    elif any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        reason = "is expanded: its elements share memory"
    if reason:
        raise InvalidSpec(
            f"the version cannot be written to {name}: it {reason}",
            seen=f"{tuple(tensor.shape)} on {tensor.device}",
            expected="a dense tensor with memory for each element",
        )


def _check_names(published: set[str], reader_names: set[str]) -> None:
    missing, unexpected = sorted(reader_names - published), sorted(published - reader_names)
    if missing or unexpected:
        raise InvalidSpec(
            "the version is not of this model",
            seen=f"without {_some(missing)}; with {_some(unexpected)}, which the model lacks",
            expected="the same names on both sides",
            fix="Fetch without into= and take the tensors by name.",
        )


def _some(names: Sequence[str]) -> str:
    return short_list(names, NAMED) or "none"


def _check_fits(tensor: StoredTensor, shard: TensorShard) -> None:
    if tuple(shard.shape) != tensor.shape:
        raise ShapeMismatch(
            f"{tensor.name} has another shape than in the version",
            seen=str(tuple(shard.shape)),
            expected=str(tensor.shape),
        )
    held = shard.tensor.dtype
    converts = held.is_floating_point and tensor.dtype.is_floating_point and held not in _PACKED
    if held != tensor.dtype and not converts:
        raise DtypeMismatch(
            f"{tensor.name} has another dtype than in the version",
            seen=str(held),
            expected=f"{tensor.dtype}, or floating point numbers for floating point numbers",
        )


def _checked_spec(spec: weights_pb2.TensorSpec) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if spec.dtype not in DTYPES:
        raise _malformed(f"{spec.name} of dtype {spec.dtype!r}")
    return spec.name, DTYPES[spec.dtype], tuple(spec.shape)


def _check_coverage(tensor: StoredTensor) -> None:
    count = sum(part.chunk.num_elements for part in tensor.slices)
    if count != math.prod(tensor.shape):
        raise _malformed(f"{count} elements of {tensor.name}, {tensor.shape}")
    ordered = sorted(tensor.slices, key=lambda part: part.chunk)
    for number, part in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if part.chunk.offsets and (
                other.chunk.offsets[0] >= part.chunk.offsets[0] + part.chunk.sizes[0]
            ):
                break
            if part.chunk.overlap(other.chunk) is not None:
                raise _malformed(f"elements of {tensor.name} twice")


def _malformed(seen: str) -> MalformedMessage:
    return MalformedMessage(
        "the layout of a version is malformed",
        seen=seen,
        expected="each element of each tensor once, within its segment",
    )


def whole_tensors(layout: VersionLayout, segments: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return the version's tensors by name; all names of a tied tensor map to one object.

    A tensor that is stored in one slice is a view of its segment.
    """
    tensors: dict[str, Tensor] = {}
    by_slices: dict[tuple[object, ...], Tensor] = {}
    for name, tensor in layout.tensors.items():
        slices_of = ((part.segment, part.at, part.chunk) for part in tensor.slices)
        key = (tensor.dtype, tensor.shape, *slices_of)
        if key not in by_slices or not tensor.slices:
            by_slices[key] = tensor.read(segments)
        tensors[name] = by_slices[key]
    return tensors


def table_rows(layout: VersionLayout, segments: Mapping[int, Tensor]) -> dict[str, PublishedRows]:
    """Return the version's embedding tables by name, as views of the segments."""
    return tables_of({name: each.read(segments) for name, each in layout.tables.items()})


def merged(layouts: Sequence[weights_pb2.Layout]) -> weights_pb2.Layout:
    """Merge the layouts of all ranks, in order, as the coordinator does."""
    whole = weights_pb2.Layout()
    numbers: dict[str, int] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.tensors:
            if spec.name not in numbers:
                numbers[spec.name] = len(whole.tensors)
                whole.tensors.append(spec)
        for each in layout.slices:
            own = whole.slices.add()
            own.CopyFrom(each)
            own.tensor, own.segment = numbers[layout.tensors[each.tensor].name], rank
        whole.segment_bytes.extend(layout.segment_bytes)
    return whole
