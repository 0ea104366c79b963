"""Deflated bytes (RFC 1950) from a peer or store that is not trusted."""

import zlib


def inflate(packed: bytes, max_bytes: int) -> bytes:
    """Return what was deflated. Raises ValueError if the bytes are not deflated, are cut off, or
    inflate to more than `max_bytes`."""
    inflating = zlib.decompressobj()
    try:
        # With a full buffer the end of the bytes would not be read.
        data = inflating.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflating.eof or len(data) > max_bytes:
        raise ValueError(f"bytes that are cut off, or inflate to more than {max_bytes} bytes")
    return data
