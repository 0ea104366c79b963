"""Output of `shoal run`: its own messages on stderr, and the lines of its workers on stdout.

Training does not end because a disk is full or a terminal is gone, and does not stop because the
reader pauses: what cannot be printed is lost.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper, UnsupportedOperation
from types import TracebackType
from typing import Self, TextIO

from shoal_client.host.stop_orders import SIGNALS_SEEN_S
from shoal_proto.terminal import printable

OUTPUT_S = 2.0
"""Time for a worker's last lines before the next message of the launcher."""
PAUSED_S = 5.0
"""A reader that takes no line for this time counts as paused."""
MAX_WAITING = 8 << 20
"""Limit of the characters that wait for the reader. Above it workers wait, too, until the reader
counts as paused."""

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
    """Prints the workers' lines on stdout, by a thread of its own within the `with` block. The end
    of the block waits for the reader.

    Workers do not wait for a reader that pauses (Ctrl-S, `less`, a laptop that sleeps): new lines
    are lost until the reader has taken the waiting ones. After an error all further lines are lost;
    `note` is called if the error is that the reader has gone.
    """

    def __init__(self, note: Callable[[ReaderGone], object]) -> None:
        self._note = note
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._num_waiting = 0
        """Characters, including those of the line that is being printed."""
        self._num_accepted = self._num_printed = self._num_lost = 0
        """Numbers of lines; `_num_lost` counts since the reader paused."""
        self._stalled_at = -1
        """`_num_printed` when a flush ran into its limit."""
        self._has_failed = self._is_closed = False
        self._thread = threading.Thread(target=self._print_all, name="shoal-output", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if error is not None:
            self._thread.join(OUTPUT_S)
            return
        while self._thread.is_alive():
            self._thread.join(SIGNALS_SEEN_S)

    def print(self, line: str) -> None:
        """Print a line after the earlier ones, from any thread. Waits at most PAUSED_S for a reader
        that takes nothing."""
        with self._changed:
            while not self._is_losing and self._num_waiting + len(line) > MAX_WAITING:
                if not self._changed.wait(PAUSED_S):
                    break
            if self._is_losing or self._num_waiting + len(line) > MAX_WAITING:
                self._num_lost += 1
            else:
                self._waiting.append(line)
                self._num_waiting += len(line)
                self._num_accepted += 1
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until the present lines are printed: at most OUTPUT_S, and only once for a reader
        that pauses."""
        with self._changed:
            last = self._num_accepted
            if self._num_printed != self._stalled_at and not self._changed.wait_for(
                lambda: self._is_losing or self._num_printed >= last, timeout=OUTPUT_S
            ):
                self._stalled_at = self._num_printed

    @property
    def _is_losing(self) -> bool:
        return self._has_failed or self._num_lost > 0

    def _print_all(self) -> None:
        while (line := self._next()) is not None:
            try:
                _write(sys.stdout, line)
            except OSError as error:
                self._end(error)
                return
            with self._changed:
                self._num_waiting -= len(line)
                self._num_printed += 1
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Wait for a line; None once all are printed after the end of the block."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._num_lost or self._is_closed)
                if self._waiting:
                    return self._waiting.popleft()
                if not self._num_lost:
                    return None
                num_lost, self._num_lost = self._num_lost, 0
            say(
                f"the reader of stdout paused: {num_lost} of the workers' lines were not printed."
                " `shoal logs` shows them."
            )

    def _end(self, error: OSError) -> None:
        with self._changed:
            self._has_failed = True
            self._waiting.clear()
            self._changed.notify_all()
        discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            self._note(ReaderGone())
        else:
            reason = error.strerror or error
            say(f"workers' output is no longer printed: {reason}. `shoal logs` shows it.")


def _write(stream: TextIO, line: str) -> None:
    try:
        descriptor = stream.fileno() if isinstance(stream, TextIOWrapper) else None
    except UnsupportedOperation:
        descriptor = None
    if descriptor is None:  # a test's stream, or a notebook's
        print(line, file=stream, flush=True)
        return
    # Not by print(): at exit Python would wait for the stream's lock, and abort the process.
    data = f"{line}\n".encode(stream.encoding, stream.errors or "replace")
    while data:
        data = data[os.write(descriptor, data) :]


def discard(stream: TextIO) -> None:
    """Discard what the stream still holds, and all that is written to it later: at exit, an error
    in Python's last flush would set the exit code to 120."""
    with suppress(UnsupportedOperation):  # a stream without a descriptor
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _drop_unwritten(stream: TextIO) -> None:
    """Discard what the stream still holds; later writes reach its file again."""
    kept = os.dup(stream.fileno())
    discard(stream)
    stream.flush()
    os.dup2(kept, stream.fileno())
    os.close(kept)
