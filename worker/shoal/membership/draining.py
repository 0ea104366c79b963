"""Leaving in good order: what a script sees of it, and the signal that asks for it."""

import _thread
import atexit
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any

from shoal_client.host.stop_orders import SAME_ORDER_S, StopOrders
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


Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class DrainSignal:
    """Takes a SIGTERM as a wish to drain. A repetition within SAME_ORDER_S has no effect, even as
    the script unwinds; a second SIGTERM after that ends the process, as by default.

    Only if nobody else handles it, and if handlers can be set: in the main thread. A process that
    the script forks is no member, and is ended by the first.
    """

    def __init__(self, drain: Callable[[str], None]) -> None:
        self._drain = drain
        self._installed = False
        self._orders = StopOrders()
        self._was_ordered = False
        self._next: Handler = signal.SIG_DFL
        """Handles the second order."""

    def install(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and _is_free(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    @contextmanager
    def while_joining(self) -> Iterator[None]:
        """Take the signal from now on, unless the block fails."""
        self.install()
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Let the signal end the process again, unless another handler has come meanwhile. If there
        was an order, it does so from the second one on."""
        if self._is_in_place and self._installed and not self._was_ordered:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    @property
    def _is_in_place(self) -> bool:
        return _get_handler(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._orders.repeats(number):
            return
        if self._installed and not self._was_ordered:
            self._was_ordered = True
            self._stay_while_fresh()
            self._drain("SIGTERM")
        else:
            _set_handler(number, self._next)
            signal.raise_signal(number)

    def _stay_while_fresh(self) -> None:
        """Let no handler that the script sets now, or puts back, take a repetition of the order.
        The script sees its handler in place, which gets the second order."""
        set_before, get_before = signal.signal, signal.getsignal

        def set_behind(number: int, handler: Handler) -> Handler:
            takes_over = isinstance(getattr(handler, "__self__", None), DrainSignal)
            if number != signal.SIGTERM or takes_over or not self._orders.is_fresh:
                return set_before(number, handler)
            before = get_behind(number)
            set_before(number, self._handle)
            self._next = handler
            return before

        def get_behind(number: int) -> Handler:
            handler = get_before(number)
            return self._next if handler == self._handle else handler

        signal.signal, signal.getsignal = set_behind, get_behind  # type: ignore[assignment]

        def go() -> None:
            time.sleep(SAME_ORDER_S)
            if signal.signal is set_behind:
                signal.signal, signal.getsignal = set_before, get_before
            if self._is_in_place and self._next == signal.SIG_DFL:
                # A handler in Python would wait for ever for a main thread that hangs.
                _set_by_libc(signal.SIGTERM, None)

        # As the interpreter ends it puts every handler in Python back to the default.
        atexit.register(self._ignore_repetitions)
        # threading.Thread takes locks, which the interrupted code may hold.
        _thread.start_new_thread(go, ())

    def _ignore_repetitions(self) -> None:
        if self._is_in_place and self._orders.is_fresh:
            _set_handler(signal.SIGTERM, signal.SIG_IGN)


_set_handler, _get_handler = signal.signal, signal.getsignal
_set_by_libc = ctypes.PyDLL(None).signal
_set_by_libc.argtypes = (ctypes.c_int, ctypes.c_void_p)
_set_by_libc.restype = ctypes.c_void_p


class _Forking(threading.local):
    """By thread: any may fork."""

    mask: set[signal.Signals | int] | None = None
    """What was blocked before, where the signal is a wish to drain."""


_forking = _Forking()


def _hold_signal() -> None:
    """A process is about to be forked. One that came to it before it is no member any more would be
    taken for a wish to drain, or be lost; a pool that had sent it would wait for ever."""
    if isinstance(getattr(_get_handler(signal.SIGTERM), "__self__", None), DrainSignal):
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
    """True if nobody handles the signal.

    A script that keeps a handler aside and puts it back later, as Lightning's Trainer does, may put
    back that of a session which is over.
    """
    left_over = getattr(handler, "__self__", None)
    if isinstance(left_over, DrainSignal):
        return not left_over._installed and _is_free(left_over._next)
    return handler is signal.SIG_DFL
