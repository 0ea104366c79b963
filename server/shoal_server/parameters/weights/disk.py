"""Segments on this server's own disk, for versions that must survive the end of all servers."""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import structlog

from shoal_proto import CHUNK_BYTES
from shoal_proto.names import is_name
from shoal_proto.segments.digests import DIGEST_BYTES, chunks_of
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_server.snapshots.storage import sync_folder

log = structlog.get_logger(__name__)

DRAFT = ".draft"
_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class WeightDisk:
    """Files of segments, `JOB/NAME/DIGEST`. A file is whole or absent, and only this user can read
    it. All calls block."""

    def __init__(self, directory: Path) -> None:
        """Take over the segments that an earlier process left in the directory. Raises OSError."""
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._written = {self._path(*each) for each in self._found()}

    def holds(self, series: str, digest: bytes) -> bool:
        """True if the segment is on disk durably."""
        return self._path(series, digest) in self._written

    def write(self, series: str, segment: Segment) -> None:
        """Write a segment to disk. Raises OSError; then `holds` answers as before."""
        path = self._path(series, segment.digest)
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_name(path.name + DRAFT)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for chunk in chunks_of(segment.view()):
                    at = 0
                    while at < len(chunk):
                        at += file.write(chunk[at:]) or 0
                os.fsync(file.fileno())
            draft.replace(path)
            # The names may be new entries in their parent folders.
            for folder in (path.parent, path.parent.parent, self._directory):
                sync_folder(folder)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._written.add(path)

    def read(self, series: str, digest: bytes) -> Segment | None:
        """Read and verify a segment; None if it is not on disk. A damaged segment is removed.
        Raises OSError, or Overloaded if there is no memory for it; after EIO, `holds` is False."""
        path = self._path(series, digest)
        try:
            return self._read(series, digest, path)
        except OSError as error:
            if error.errno == errno.EIO:
                # The file is kept: a later process of this server may be able to read it.
                self._written.discard(path)
            raise

    def _read(self, series: str, digest: bytes, path: Path) -> Segment | None:
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            return None
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            writer = SegmentWriter(num_bytes)
            try:
                _read_into(file.fileno(), writer.buffer)
                segment = writer.seal()
            except BaseException:
                writer.close()
                raise
        if segment.digest == digest:
            return segment
        segment.close()
        log.error("segment_damaged_on_disk", series=series, file=str(path))
        self.remove(series, digest)
        return None

    def remove(self, series: str, digest: bytes) -> None:
        """Remove a segment, if it is there. Raises OSError."""
        path = self._path(series, digest)
        self._written.discard(path)
        path.unlink(missing_ok=True)

    def all(self) -> list[tuple[str, bytes]]:
        """Return series and digest of each segment on disk. Removes drafts, so `write` must not run
        meanwhile."""
        return [each for each in self._found() if self.holds(*each)]

    def _found(self) -> Iterator[tuple[str, bytes]]:
        for path in self._directory.glob("*/*/*"):
            job, name, file = path.relative_to(self._directory).parts
            if file.endswith(DRAFT):
                path.unlink()
            elif is_name(job) and is_name(name) and _DIGEST.fullmatch(file):
                yield f"{job}/{name}", bytes.fromhex(file)

    def _path(self, series: str, digest: bytes) -> Path:
        return self._directory / series / digest.hex()


def _read_into(descriptor: int, buffer: memoryview) -> None:
    for start in range(0, len(buffer), CHUNK_BYTES):
        chunk = buffer[start : start + CHUNK_BYTES]
        at = 0
        while at < len(chunk):
            count = os.preadv(descriptor, [chunk[at:]], start + at)
            if not count:
                # The file has become shorter: the digest will not match.
                return
            at += count
