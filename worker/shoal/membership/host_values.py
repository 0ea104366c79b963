"""Values of a generation's store that all ranks of one host read: one of them reads for all.

Of a group of thousands each rank reads what all have set. So the first rank of a host asks the
coordinator, and leaves the answer in the directory that their launcher made for them; the others
take it from there. For values that are set once, such as the addresses of Gloo's ranks.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from shoal_client.membership.shared_chunks import locked

log = structlog.get_logger(__name__)

MIN_KEYS = 64
"""Fewer at a time are asked for by each rank itself."""
LOCK_WAIT_S = 10.0
"""For another rank that asks: it waits for the slowest of all. Then this one asks too."""
MAX_FILES = 8
_DIGEST_BYTES = 32


class HostValues:
    """The answers that one rank shares with the others of its host."""

    def __init__(self, directory: Path, closing: threading.Event) -> None:
        """`closing` ends a wait for another rank."""
        self._directory = directory / "values"
        self._closing = closing

    def get(self, asked: Sequence[str], ask: Callable[[], bytes]) -> bytes:
        """The answer to what was asked, the same words for all; `ask` gets it where no rank of this
        host has it. Raises what that raises."""
        path = self._directory / hashlib.sha256("\0".join(asked).encode()).hexdigest()
        if (found := _read(path)) is not None:
            return found
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.info("values_not_shared", directory=str(self._directory), reason=str(error))
            return ask()
        with locked(self._directory, self._closing, LOCK_WAIT_S):
            if (found := _read(path)) is not None:
                return found
            answer = ask()
            self._write(path, answer)
            return answer

    def _write(self, path: Path, answer: bytes) -> None:
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(hashlib.sha256(answer).digest() + answer)
            unfinished.rename(path)
            files = [each for each in self._directory.iterdir() if each.name != "lock"]
            files.sort(key=lambda each: each.stat().st_mtime)
            for old in files[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            # The other ranks ask for themselves.
            log.info("values_not_shared", directory=str(self._directory), reason=str(error))


def _read(path: Path) -> bytes | None:
    """What a rank left there whole; None if none did."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    answer = kept[_DIGEST_BYTES:]
    return answer if hashlib.sha256(answer).digest() == kept[:_DIGEST_BYTES] else None
