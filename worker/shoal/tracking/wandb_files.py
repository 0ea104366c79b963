"""The file in which wandb keeps a run: protobuf records, framed as in LevelDB's log.

Frames never cross a block of 32 KiB; a record that does is cut into several. The format is
described at https://github.com/google/leveldb/blob/main/doc/log_format.md; wandb puts seven bytes
before it, which count as part of the first block.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 32768
FILE_HEADER_BYTES = 7
_FRAME = struct.Struct("<IHB")
"""Checksum, number of bytes, kind."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file that may be written still, or cut off."""
    data, at, parts = path.read_bytes(), FILE_HEADER_BYTES, b""
    while at + _FRAME.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < _FRAME.size:
            at += left
            continue
        _, num_bytes, kind = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        at = start + num_bytes
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at > len(data):
            return
        parts = data[start:at] if kind in (_FULL, _FIRST) else parts + data[start:at]
        if kind in (_FULL, _LAST):
            yield parts
