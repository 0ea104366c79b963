"""Answers of the coordinator that the processes of one host share: the first process that needs an
answer fetches it for all."""

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

MAX_FILES = 8
LOOK_AGAIN_S = 0.005
"""The kernel does not notify of the lock's release: try this often."""
_DIGEST_BYTES = 32


class HostFiles:
    """Answers as files in a folder that the processes of one host share.

    A file begins with a digest of the rest, so that a truncated file is not used. A lock keeps two
    processes from fetching the same answer; the others wait for at most `wait_s`.
    """

    def __init__(self, directory: Path, closing: threading.Event, wait_s: float) -> None:
        """`closing` ends a wait for another process."""
        self._directory = directory
        self._closing = closing
        self._wait_s = wait_s

    def get(self, key: str, ask: Callable[[], bytes]) -> bytes:
        """The answer named `key`; `ask` fetches it if no process of this host has it, and may
        raise.
        """
        path = self._directory / hashlib.sha256(key.encode()).hexdigest()
        if (found := _read(path)) is not None:
            return found
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.info("host_files_not_shared", directory=str(self._directory), reason=str(error))
            return ask()
        with locked(self._directory, self._closing, self._wait_s):
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
            # Other processes fetch the answer themselves.
            log.info("answer_not_shared", directory=str(self._directory), reason=str(error))


def _read(path: Path) -> bytes | None:
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    answer = kept[_DIGEST_BYTES:]
    return answer if hashlib.sha256(answer).digest() == kept[:_DIGEST_BYTES] else None


@contextmanager
def locked(directory: Path, closing: threading.Event, wait_s: float) -> Iterator[None]:
    """Hold the directory's lock; go on without it after `wait_s`, or once `closing` is set."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.info("host_files_not_shared", directory=str(directory), reason=str(error))
        yield
        return
    try:
        give_up_s = time.monotonic() + wait_s
        while not _lock(descriptor) and time.monotonic() < give_up_s:
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
