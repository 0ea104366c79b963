"""Private names of torch.distributed.checkpoint: positions of entries, names of files."""

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix

try:  # The public name, which torch 2.13 lacks; 2.15 warns of the private one.
    from torch.distributed.checkpoint.fsspec_filesystem import (  # type: ignore[import-not-found]
        FsspecReader,
        FsspecWriter,
    )
except ModuleNotFoundError:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter", "StorageInfo", "StoragePrefix", "flatten_state_dict"]

StorageInfo = _StorageInfo
"""File, offset and length of an entry."""

StoragePrefix = _StoragePrefix
"""Prefix of the names of a writer's files."""
