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

_printing = threading.Lock()


@dataclass(frozen=True)
class ReaderGone:
    """Event: the workers' lines go to a pipe that nobody reads any more."""


def say(text: str) -> None:
    """Print a message on stderr, from any thread."""
    with _printing:
        try:
            print(f"shoal run: {printable(text, lines=True)}", file=sys.stderr, flush=True)
        except OSError:
            discard(sys.stderr)


class WorkerOutput:
    """Prints the workers' lines on stdout, from any thread. After an error, further lines are lost;
    `note` is called if the error is that the reader has gone."""

    def __init__(self, note: Callable[[ReaderGone], object]) -> None:
        self._note = note
        self._has_failed = False

    def print(self, line: str) -> None:
        """Print a line."""
        with _printing:
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
