"""Of torch.distributed.checkpoint: where an entry lies in its files."""

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo
"""File, offset and length of an entry, as `.metadata` pickles it."""
