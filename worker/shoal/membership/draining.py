"""Leaving in good order: what a script sees of it, and the signal that asks for it."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType

from shoal_proto.errors import MemberDrained

EXIT_CODE = 128 + signal.SIGTERM
"""As of a process that SIGTERM ended. `shoal run` does not start such a worker again."""


class Drained(SystemExit):
    """This member was asked to leave, and nothing needs it any more: the script is to end.

    Raised between two steps. A SystemExit: a script that does not catch it unwinds, and its
    process exits with 143.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _AsDrained:
    # A class of its own: each step goes through it, and a generator takes ten times as long.

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, MemberDrained):
            raise Drained(error.seen or str(error)) from error


def drained() -> AbstractContextManager[None]:
    """Raises Drained for the MemberDrained that ends a membership."""
    return _AsDrained()


class DrainSignal:
    """Takes the first SIGTERM as a wish to drain; a second one ends the process, as by default.

    Only where nobody else handles it, and where handlers can be set: in the main thread. A process
    that the script forks is no member, and is ended by the first.
    """

    def __init__(self, drain: Callable[[str], None]) -> None:
        self._drain = drain
        self._installed = False

    def install(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and _is_free(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def restore(self) -> None:
        """Let the signal end the process again, unless another handler has come meanwhile."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if self._installed:
            self._drain("SIGTERM")
        else:
            signal.raise_signal(number)


class _Forking(threading.local):
    """By thread: any may fork."""

    mask: set[signal.Signals | int] | None = None
    """What was blocked before, where the signal is a wish to drain."""


_forking = _Forking()


def _hold_signal() -> None:
    """A process is about to be forked. One that came to it before it is no member any more would be
    taken for a wish to drain, or be lost; a pool that had sent it would wait for ever."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), DrainSignal):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_signal_go() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_no_member() -> None:
    """In a process that was just forked: a pool ends its own by SIGTERM, and waits for that."""
    if _forking.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_signal_go()


os.register_at_fork(
    before=_hold_signal, after_in_parent=_let_signal_go, after_in_child=_be_no_member
)


def _is_free(handler: object) -> bool:
    """Whether nobody handles the signal.

    Who keeps a handler aside and puts it back later, as Lightning's Trainer does, may put back that
    of a session which is over.
    """
    left_over = getattr(handler, "__self__", None)
    if isinstance(left_over, DrainSignal):
        return not left_over._installed
    return handler is signal.SIG_DFL
