"""Reader of `.metadata`, the index of a checkpoint, which DCP pickles.

A pickle can run any code, so the unpickler creates only the classes of DCP's index.
"""

import enum
import io
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shoal.checkpoint import names
from shoal.checkpoint.bucket_paths import CheckpointPath, size_of
from shoal.checkpoint.directory import METADATA
from shoal.checkpoint.entries import FileSpan
from shoal.state.shards import Chunk
from shoal.torch_private.checkpoint import StorageInfo
from shoal_proto.errors import InvalidSpec, MalformedMessage

_MODULES: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "builtins": frozenset({"getattr"}),
    "__builtin__": frozenset({"getattr"}),
    "pathlib": frozenset({"PosixPath"}),
    "pathlib._local": frozenset({"PosixPath"}),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _MODULES.get(module, ())
        if module == "torch":
            allowed = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in an index")
        if name == "TensorProperties":
            return _Properties
        return _enum_member if name == "getattr" else super().find_class(module, name)


class _Properties(TensorProperties):
    """Properties of a tensor. torch 2.15 writes a sixth one, which releases up to 2.13 do not
    expect."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:5])  # type: ignore[no-untyped-call]


def _enum_member(kind: Any, name: Any) -> enum.Enum:
    """Return an enum's member by its name; `_MODULES` must allow the enum's class. Some releases of
    Python, such as 3.11.0, pickle a member as a call of `getattr`."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"getattr of {kind!r:.100} is not allowed in an index")
    return kind.__members__[name]


@dataclass(frozen=True)
class IndexedTensor:
    """Tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Mapping[Chunk, FileSpan]
    """Chunks with their spans; they may not cover the whole tensor."""


@dataclass(frozen=True)
class CheckpointIndex:
    """Tensors of a checkpoint with their chunks, and spans of its objects."""

    tensors: Mapping[names.Path, IndexedTensor]
    objects: Mapping[names.Path, FileSpan]


def read_index(path: CheckpointPath, content: bytes | None = None) -> CheckpointIndex:
    """Read the index of the checkpoint at `path`.

    `content`: the index, if it is not published yet. Raises InvalidSpec if there is no checkpoint,
    or if a later version of DCP wrote it. Raises MalformedMessage if the index is damaged or refers
    to bytes that the files do not contain, and OSError if the storage fails.
    """
    if content is None and size_of(path / METADATA) < 0:
        raise InvalidSpec(
            f"{path} is not a checkpoint",
            seen=f"no {METADATA} there",
            expected="a directory that torch.distributed.checkpoint or Shoal has written",
            fix="Give the path of one checkpoint, such as Checkpoints(...).newest() returns.",
        )
    metadata = _metadata(path, content)
    tensors: dict[names.Path, IndexedTensor] = {}
    objects: dict[names.Path, FileSpan] = {}
    try:
        for key, entry in metadata.state_dict_metadata.items():
            name = _path(metadata, key)
            if isinstance(entry, TensorStorageMetadata):
                chunks = dict(_chunks(metadata, key, entry))
                tensors[name] = IndexedTensor(tuple(entry.size), entry.properties.dtype, chunks)
            else:
                objects[name] = _span(metadata.storage_data[MetadataIndex(key)])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error
    index = CheckpointIndex(tensors, objects)
    _check_files(path, index)
    return index


def _metadata(path: CheckpointPath, content: bytes | None) -> Metadata:
    if content is None:
        # An error of the storage does not mean that the index is damaged.
        content = (path / METADATA).read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # damaged bytes make pickle raise anything
        raise _damaged(path, repr(error)) from error
    if not isinstance(metadata, Metadata):
        raise _damaged(path, type(metadata).__name__)
    version = str(getattr(metadata, "version", None) or "1.0.0")
    if version.partition(".")[0] != "1":
        raise InvalidSpec(
            f"the checkpoint {path} was written by a later torch.distributed.checkpoint",
            seen=f"version {version}",
            expected="version 1",
            fix="Read it with the torch that wrote it, or a later one.",
        )
    return metadata


def _path(metadata: Metadata, key: str) -> names.Path:
    paths = metadata.planner_data or {}
    if key in paths:
        return tuple(paths[key])
    # The state was saved flat, with keys that look flattened.
    return tuple(key.split(".", 1))


def _chunks(
    metadata: Metadata, key: str, entry: TensorStorageMetadata
) -> Iterator[tuple[Chunk, FileSpan]]:
    for stored in entry.chunks:
        chunk = Chunk(offsets=tuple(stored.offsets), sizes=tuple(stored.sizes))
        yield chunk, _span(metadata.storage_data[MetadataIndex(key, stored.offsets)])


def _span(stored: StorageInfo) -> FileSpan:
    if getattr(stored, "transform_descriptors", None):
        raise ValueError("its files are compressed or encrypted by an extension")
    file = stored.relative_path
    if not isinstance(file, str) or "/" in file or file in {"", ".", ".."}:
        raise ValueError(f"file {file!r}")
    if stored.offset < 0 or stored.length < 0:
        raise ValueError(f"{stored.length} bytes from {stored.offset} of {file}")
    return (file, stored.offset, stored.length)


def _check_files(path: CheckpointPath, index: CheckpointIndex) -> None:
    ends: dict[str, int] = {}
    spans = (span for stored in index.tensors.values() for span in stored.chunks.values())
    for file, offset, length in (*spans, *index.objects.values()):
        ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in ends.items():
        size = size_of(path / file)
        if size < end:
            raise MalformedMessage(
                f"the checkpoint {path} is truncated",
                seen=f"no file {file}" if size < 0 else f"{size} bytes in {file}",
                expected=f"at least {end} bytes in {file}",
                fix="Use an older checkpoint.",
            )


def _damaged(path: CheckpointPath, seen: str) -> MalformedMessage:
    return MalformedMessage(
        f"the index {path / METADATA} cannot be read",
        seen=seen[:200],
        expected="an index written by torch.distributed.checkpoint",
        fix="Use an older checkpoint.",
    )
