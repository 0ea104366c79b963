"""Drain of a member: the exception that a script sees, and the signal that asks for it."""

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
"""The exit code of a process ended by SIGTERM. `shoal run` does not restart such a worker."""


class Drained(SystemExit):
    """This member was asked to leave and is not needed any more: the script should end.

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
    """Handles a SIGTERM as a request to drain. A repetition within SAME_ORDER_S has no effect, even
    while the script unwinds; a second SIGTERM after that ends the process, as by default.

    Only if the script does not handle it, and if handlers can be set: in the main thread. A process
    that the script forks is no member, and the first SIGTERM ends it.
    """

    def __init__(self, drain: Callable[[str], None]) -> None:
        self._drain = drain
        self._installed = False
        self._orders = StopOrders()
        self._was_ordered = False
        self._next: Handler = signal.SIG_DFL
        """The handler of the second order."""

    def install(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and _is_free(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    @contextmanager
    def while_joining(self) -> Iterator[None]:
        """Handle the signal from now on, unless the block fails."""
        self.install()
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Let the signal end the process again, unless another handler was set meanwhile. After an
        order, the second one does so."""
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
        """Keep a handler that the script sets now, or puts back, from seeing a repetition of the
        order. The script sees its handler in place, and that one gets the second order."""
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

        # The interpreter resets every Python handler to the default as it ends.
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
    """State by thread, since any thread may fork."""

    mask: set[signal.Signals | int] | None = None
    """The signals blocked before, if this handler is in place."""


_forking = _Forking()


def _hold_signal() -> None:
    """Block the signal before a fork. In the child, a SIGTERM that arrived too early would count as
    a request to drain, or be lost; a process pool that had sent it would wait for ever."""
    if isinstance(getattr(_get_handler(signal.SIGTERM), "__self__", None), DrainSignal):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_signal_go() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_no_member() -> None:
    """Reset the signal in a forked child: a pool ends its processes by SIGTERM and waits for it."""
    if _forking.mask is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_signal_go()


os.register_at_fork(
    before=_hold_signal, after_in_parent=_let_signal_go, after_in_child=_be_no_member
)


def _is_free(handler: object) -> bool:
    """True if the script does not handle the signal.

    A script that keeps a handler aside and puts it back later, as Lightning's Trainer does, may put
    back the handler of an earlier session.
    """
    left_over = getattr(handler, "__self__", None)
    if isinstance(left_over, DrainSignal):
        return not left_over._installed and _is_free(left_over._next)
    return handler is signal.SIG_DFL
