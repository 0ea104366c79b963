"""Comparison of a backup with its primary, piece by piece while pushes go on.

A backup replays its primary's updates, so the two are equal to the last bit. They differ only after
a fault of memory, arithmetic or this program, or if their versions of torch round differently. The
primary digests a piece at intervals, and sends the digest in the stream of records. The backup
digests the same piece after the same records:

    walk = PieceWalk()
    digest = walk.next(shard)                    at the primary, which sends it after a record
    compared(copy, digest)                       at the backup, before the next record is replayed

A piece takes the shard's lock for about a millisecond. A walk covers values, optimizer state, rows
and remembered pushes. A piece of rows is a list of ids, as rows' positions differ between replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from shoal_proto.checksum import crc32
from shoal_server.parameters.shard.sessions import exported
from shoal_server.parameters.shard.versioned import AnyShard

PIECE_BYTES = 1024 * 1024
SESSIONS_A_PIECE = 32
SESSIONS, ROWS = "sessions", "rows"
"""Names of the parts that are not tensors; no tensor has such a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestRange:
    part: str
    """A tensor's name, SESSIONS or ROWS."""
    start: int = 0
    """A byte of a tensor, or the index of a session."""
    stop: int = 0
    row_ids: bytes = b""
    """Ids of rows, as int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceDigest:
    version: int
    piece: DigestRange
    checksum: int


class Comparison(Enum):
    SAME = "same"
    DIFFERENT = "different"
    ANOTHER_VERSION = "another version"
    """Nothing was compared."""


class PieceWalk:
    """Walks through a shard piece by piece, again and again, even if the shard's size changes
    meanwhile. Not thread-safe."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._part = 0
        self._at = 0
        self.num_rounds = 0
        """Complete walks."""

    def next(self, shard: AnyShard) -> PieceDigest:
        """The digest of the next piece. Takes the shard's lock."""

        def look(version: int) -> PieceDigest:
            piece = self._next_piece(shard)
            return PieceDigest(version=version, piece=piece, checksum=_checksum(shard, piece))

        return shard.read(look)

    def _next_piece(self, shard: AnyShard) -> DigestRange:
        parts = [*sorted(shard.body.flat_tensors()), ROWS, SESSIONS]
        while self._part < len(parts):
            piece = self._piece_of(shard, parts[self._part])
            if piece is None:
                self._part, self._at = self._part + 1, 0
                continue
            if piece.part == SESSIONS and piece.stop > len(shard.sessions):
                self._part, self._at = 0, 0
                self.num_rounds += 1
            return piece
        self._part, self._at = 0, 0
        return self._next_piece(shard)

    def _piece_of(self, shard: AnyShard, part: str) -> DigestRange | None:
        start = self._at
        if part == ROWS:
            row_ids, self._at = shard.body.row_ids(start, self._piece_bytes)
            return DigestRange(part=part, row_ids=row_ids) if self._at > start else None
        if part == SESSIONS:
            # One more session than exists, so that a backup with further sessions is detected.
            size, step = len(shard.sessions) + 1, SESSIONS_A_PIECE
        else:
            size, step = shard.body.flat_tensors()[part].nbytes, self._piece_bytes
        if start >= size:
            return None
        self._at = min(start + step, size)
        return DigestRange(part=part, start=start, stop=self._at)


def compared(shard: AnyShard, digest: PieceDigest) -> Comparison:
    """Compare a digest with this shard. Takes the shard's lock."""

    def look(version: int) -> Comparison:
        if version != digest.version:
            return Comparison.ANOTHER_VERSION
        is_same = _checksum(shard, digest.piece) == digest.checksum
        return Comparison.SAME if is_same else Comparison.DIFFERENT

    return shard.read(look)


def _checksum(shard: AnyShard, piece: DigestRange) -> int:
    """Checksum of a piece; -1, which no piece has, if its tensor does not exist."""
    body = shard.body
    if piece.part == ROWS:
        births, tensors = body.rows_of(piece.row_ids)
        crc = crc32(np.ascontiguousarray(births).view(np.uint8))
        return _folded(tensors, crc)
    if piece.part == SESSIONS:
        return _of_sessions(shard, piece)
    tensor = body.flat_tensors().get(piece.part)
    if tensor is None:
        return -1
    return _folded([_bytes(tensor)[piece.start : piece.stop]], 0)


def _of_sessions(shard: AnyShard, piece: DigestRange) -> int:
    crc = crc32(str(len(shard.sessions)).encode())
    sessions = islice(shard.sessions.freeze().items(), piece.start, piece.stop)
    for image in exported(dict(sessions)):
        crc = crc32(image.SerializeToString(deterministic=True), crc)
        for sequence in image.sequences:
            crc = crc32(shard.body.fates(image.session, sequence), crc)
    return crc


def _folded(tensors: Sequence[Tensor], crc: int) -> int:
    for tensor in tensors:
        crc = crc32(_bytes(tensor).numpy().data, crc)
    return crc


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
