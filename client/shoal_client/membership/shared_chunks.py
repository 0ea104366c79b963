"""Chunks that the members of one host have in common: whoever needs one first fetches it for all.

Files in a directory that their launcher made for them, each named by its digest. What is read is
checked against that, so nobody need be trusted and a file that is cut off is fetched again. A lock
keeps members that need the same from fetching it twice; the kernel lets go of it when its holder
ends, and nobody waits for long for one that stands still.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from shoal_proto.packing.roster_chunks import digest_of

log = structlog.get_logger(__name__)

MAX_FILES = 512
LOCK_WAIT_S = 2.0
"""For another member that fetches; then this one fetches too."""
LOOK_AGAIN_S = 0.005

Fetch = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]


class SharedChunks:
    """The chunks of one host. One object for each member of it."""

    def __init__(self, directory: Path, closing: threading.Event) -> None:
        """`closing` ends every wait."""
        self._directory = directory
        self._closing = closing

    def get(self, digests: Iterable[bytes], fetch: Fetch) -> dict[bytes, bytes]:
        """The chunks; `fetch` gets those that no member of this host has. Raises what it raises."""
        wanted = list(dict.fromkeys(digests))
        found = self._read(wanted)
        if len(found) == len(wanted):
            return found
        with locked(self._directory, self._closing):
            found |= self._read([digest for digest in wanted if digest not in found])
            missing = [digest for digest in wanted if digest not in found]
            if missing:
                fetched = fetch(missing)
                found |= fetched
                self._write(fetched)
        return found

    def _read(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        found = {}
        for digest in digests:
            try:
                chunk = (self._directory / digest.hex()).read_bytes()
            except OSError:
                continue  # nobody has fetched it yet
            if digest_of(chunk) == digest:
                found[digest] = chunk
        return found

    def _write(self, chunks: Mapping[bytes, bytes]) -> None:
        try:
            for digest, chunk in chunks.items():
                path = self._directory / digest.hex()
                unfinished = path.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(chunk)
                unfinished.rename(path)
            self._trim()
        except OSError as error:
            # The other members fetch it themselves.
            log.info("chunks_not_shared", directory=str(self._directory), reason=str(error))

    def _trim(self) -> None:
        found = (path for path in self._directory.iterdir() if path.is_file())
        files = sorted(found, key=lambda path: path.stat().st_mtime)
        for path in files[:-MAX_FILES]:
            path.unlink(missing_ok=True)


@contextmanager
def locked(
    directory: Path, closing: threading.Event, wait_s: float = LOCK_WAIT_S
) -> Iterator[None]:
    """Alone among those of this host that lock the directory, or after `wait_s` not alone, or once
    `closing` is set."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.info("nothing_shared", directory=str(directory), reason=str(error))
        yield
        return
    try:
        give_up_s = time.monotonic() + wait_s
        while not _lock(descriptor) and time.monotonic() < give_up_s:
            # Of a file lock that is let go of nobody is told.
            if closing.wait(LOOK_AGAIN_S):
                break
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
