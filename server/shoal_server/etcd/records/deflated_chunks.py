"""Layouts in etcd, deflated (zlib) as a whole and then cut into chunks, since some are larger than
a request to etcd may be.

A chunk's key contains the layout's digest, so parts of two layouts are never mixed.
"""

import hashlib
import zlib
from collections.abc import Iterable

from shoal_proto.deflated import inflate
from shoal_server.etcd.json_fields import UnreadableRecord, as_unreadable

CHUNK_BYTES = 512 * 1024
"""etcd takes requests up to 1.5 MiB."""
MAX_LAYOUT_BYTES = 32 * 1024 * 1024


def digest_of(layout: bytes) -> str:
    return hashlib.sha256(layout).hexdigest()


def cut(layout: bytes) -> list[bytes]:
    packed = zlib.compress(layout)
    return [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]


def join(chunks: Iterable[bytes], digest: str) -> bytes:
    """The layout of that digest. Raises UnreadableRecord unless `chunks` are all its chunks, in
    order."""
    with as_unreadable():
        layout = inflate(b"".join(chunks), MAX_LAYOUT_BYTES)
    if digest_of(layout) != digest:
        raise UnreadableRecord(f"chunks that do not belong to digest {digest[:12]}")
    return layout
