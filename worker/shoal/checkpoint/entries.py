"""Entries of a checkpoint in DCP's format, and their index."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from shoal.checkpoint import names
from shoal.checkpoint.directory import METADATA
from shoal.checkpoint.write_plan import PlannedChunk
from shoal.state.shards import Chunk
from shoal.torch_private.checkpoint import StorageInfo, StoragePrefix

FileSpan = tuple[str, int, int]
"""Location of an entry: name of the file, offset and length in bytes."""


@dataclass(frozen=True)
class CheckpointEntry:
    """A chunk of a tensor, or one object."""

    path: names.Path
    data: TensorWriteData | None = None

    @classmethod
    def of_item(cls, item: PlannedChunk) -> "CheckpointEntry":
        return cls(names.path_of(item.name), _data(item.shape, item.dtype, item.chunk))

    @classmethod
    def of_value(cls, path: names.Path, value: object) -> "CheckpointEntry":
        if not isinstance(value, Tensor):
            return cls(path)
        return cls(path, _data(tuple(value.shape), value.dtype, Chunk.whole(value.shape)))

    @property
    def index(self) -> MetadataIndex:
        offsets = self.data.chunk.offsets if self.data else None
        return MetadataIndex(names.key_of(self.path), offsets)

    @property
    def item(self) -> WriteItem:
        kind = WriteItemType.SHARD if self.data else WriteItemType.BYTE_IO
        return WriteItem(index=self.index, type=kind, tensor_data=self.data)


def _data(shape: tuple[int, ...], dtype: torch.dtype, chunk: Chunk) -> TensorWriteData:
    return TensorWriteData(
        chunk=ChunkStorageMetadata(
            offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)
        ),
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
    )


class _GivenPlanner(DefaultSavePlanner):
    def __init__(self, given: Mapping[MetadataIndex, object]) -> None:
        super().__init__()
        self._given = given

    def lookup_object(self, index: MetadataIndex) -> object:
        return self._given[index]


def write_files(
    writer: FileSystemWriter,
    rank: int,
    entries: Sequence[tuple[CheckpointEntry, object]],
    *,
    prefix: str = "",
) -> list[FileSpan]:
    """Write the rank's file; return the entries' spans, in the given order.

    `prefix`: the beginning of the file's name.
    """
    if not entries:
        return []
    items = [entry.item for entry, _ in entries]
    plan = SavePlan(items, storage_data=StoragePrefix(f"{prefix}__{rank}_"))
    values = {entry.index: value for entry, value in entries}
    written = writer.write_data(plan, _GivenPlanner(values)).wait()
    spans = {result.index: result.storage_data for result in written}
    ordered = [spans[entry.index] for entry, _ in entries]
    return [(span.relative_path, span.offset, span.length) for span in ordered]


def index_of(stored: Iterable[tuple[CheckpointEntry, FileSpan]]) -> bytes:
    """Return the content of `.metadata`."""
    with TemporaryDirectory(prefix="shoal-index-") as directory:
        write_index(Path(directory), stored)
        return (Path(directory) / METADATA).read_bytes()


def write_index(directory: Path, stored: Iterable[tuple[CheckpointEntry, FileSpan]]) -> None:
    """Write `.metadata` durably, which makes the directory a checkpoint for DCP."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, names.Path] = {}
    results: list[WriteResult] = []
    for entry, (file, offset, length) in stored:
        key = names.key_of(entry.path)
        paths[key] = entry.path
        results.append(WriteResult(entry.index, length, StorageInfo(file, offset, length)))
        if entry.data is None:
            tensors[key] = BytesStorageMetadata()
            continue
        stored_tensor = tensors.setdefault(
            key, TensorStorageMetadata(entry.data.properties, entry.data.size, [])
        )
        assert isinstance(stored_tensor, TensorStorageMetadata), "a key names a tensor or an object"
        stored_tensor.chunks.append(entry.data.chunk)
    FileSystemWriter(directory).finish(Metadata(tensors, planner_data=paths), [results])
