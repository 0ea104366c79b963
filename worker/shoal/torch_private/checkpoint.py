"""Of torch.distributed.checkpoint: where an entry lies in its files, and how those are named."""

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix

try:  # Its public name, which torch 2.13 does not have; 2.15 warns of the other.
    from torch.distributed.checkpoint.fsspec_filesystem import (  # type: ignore[import-not-found]
        FsspecReader,
        FsspecWriter,
    )
except ModuleNotFoundError:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter", "StorageInfo", "StoragePrefix", "flatten_state_dict"]

StorageInfo = _StorageInfo
"""File, offset and length of an entry, as `.metadata` pickles it."""

StoragePrefix = _StoragePrefix
"""How the names of the files that a writer makes begin, as its plan tells it."""
