"""CRC-32, as zlib computes it, at memory speed."""

from isal.isal_zlib import crc32

__all__ = ["crc32"]
