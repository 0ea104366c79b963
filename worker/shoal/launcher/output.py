"""Output of `shoal run`: its own messages on stderr, and the lines of its workers on stdout.

Training does not end because a disk is full or a terminal is gone: what cannot be printed is lost.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from shoal_proto.terminal import printable

_saying = threading.Lock()


@dataclass(frozen=True)
class ReaderGone:
    """Event: the workers' lines go to a pipe that nobody reads any more."""


def say(text: str) -> None:
    """Print a message on stderr, from any thread."""
    with _saying:
        try:
            print(f"shoal run: {printable(text, lines=True)}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            discard(sys.stderr)
        except OSError:
            _drop_unwritten(sys.stderr)


class WorkerOutput:
    """Prints the workers' lines on stdout, from any thread. After an error, further lines are lost;
    `note` is called if the error is that the reader has gone."""

    def __init__(self, note: Callable[[ReaderGone], object]) -> None:
        self._note = note
        self._has_failed = False
        # Not that of `say`: print() blocks while the reader of stdout pauses.
        self._printing = threading.Lock()

    def print(self, line: str) -> None:
        """Print a line."""
        with self._printing:
            if self._has_failed:
                return
            try:
                print(line, flush=True)
                return
            except OSError as error:
                self._has_failed, failure = True, error
                discard(sys.stdout)
        if isinstance(failure, BrokenPipeError):
            self._note(ReaderGone())
        else:
            reason = failure.strerror or failure
            say(f"workers' output is no longer printed: {reason}. `shoal logs` shows it.")


def discard(stream: TextIO) -> None:
    """Discard what the stream still holds, and all that is written to it later: at exit, an error
    in Python's last flush would set the exit code to 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _drop_unwritten(stream: TextIO) -> None:
    """Discard what the stream still holds; later writes reach its file again."""
    kept = os.dup(stream.fileno())
    discard(stream)
    stream.flush()
    os.dup2(kept, stream.fileno())
    os.close(kept)
