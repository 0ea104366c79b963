"""Reader of the file in which wandb stores a run: protobuf records, framed as in LevelDB's log.

Frames never cross the end of a 32 KiB block; longer records are cut into several frames. See
https://github.com/google/leveldb/blob/main/doc/log_format.md. wandb's file begins with seven more
bytes, which count as part of the first block.
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
    """Yield the complete records of a file that may be incomplete, or still being written."""
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
