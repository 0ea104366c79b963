"""Layouts in etcd: deflated, and cut into chunks, since some are larger than etcd's requests.

The keys of the chunks contain the layout's digest. So a chunk may be written again, and readers of
a layout never see a part of the layout that replaces it.
"""

import hashlib
import zlib
from collections.abc import Iterable

from shoal_proto.deflated import inflate
from shoal_server.etcd.json_fields import UnreadableRecord, as_unreadable

CHUNK_BYTES = 512 * 1024
"""etcd takes requests up to 1.5 MiB."""
MAX_LAYOUT_BYTES = 32 * 1024 * 1024
"""Maximum size of a serialized layout."""


def digest_of(layout: bytes) -> str:
    """Digest of a serialized layout, for the keys of its chunks."""
    return hashlib.sha256(layout).hexdigest()


def cut(layout: bytes) -> list[bytes]:
    """Chunks of a serialized layout, in order."""
    packed = zlib.compress(layout)
    return [packed[at : at + CHUNK_BYTES] for at in range(0, len(packed), CHUNK_BYTES)]


def join(chunks: Iterable[bytes], digest: str) -> bytes:
    """The layout with that digest. Raises UnreadableRecord if `chunks` are not all its chunks, in
    order."""
    with as_unreadable():
        layout = inflate(b"".join(chunks), MAX_LAYOUT_BYTES)
    if digest_of(layout) != digest:
        raise UnreadableRecord(f"chunks that do not belong to digest {digest[:12]}")
    return layout
