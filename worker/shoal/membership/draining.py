"""Drain of a member: the exception that a script sees, and the signal that requests a drain."""

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
"""Exit code of a process that SIGTERM ends. `shoal run` does not restart such a worker."""


class Drained(SystemExit):
    """Request to end the script: this member was asked to leave, and is no longer needed.

    Raised between two steps, or by a call that waits. As a SystemExit, it ends a script that does
    not catch it, with exit code 143.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_CODE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _AsDrained:
    # A class, as each step uses it: a generator takes ten times as long.

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
    """Context that raises Drained if MemberDrained ends its block."""
    return _AsDrained()


Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class DrainSignal:
    """Handler of SIGTERM as a request to drain.

    A repetition of the signal within SAME_ORDER_S has no effect. A second SIGTERM after that time
    ends the process.

    Installed only in the main thread, and only if the script has no handler. In a forked process,
    the first SIGTERM ends the process.
    """

    def __init__(self, drain: Callable[[str], None]) -> None:
        self._drain = drain
        self._installed = False
        self._orders = StopOrders()
        self._was_ordered = False
        self._next: Handler = signal.SIG_DFL

    def install(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and _is_free(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    @contextmanager
    def handler_installed(self) -> Iterator[None]:
        """Install the handler; remove it if the block fails."""
        self.install()
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Set the default handler, unless another one was set meanwhile. After a first SIGTERM this
        handler stays, for the second."""
        if self._is_in_place and self._installed and not self._was_ordered:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def forget_order(self) -> None:
        """Forget earlier signals: the next one is not a repetition."""
        self._orders = StopOrders()

    @property
    def _is_in_place(self) -> bool:
        return _get_handler(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._orders.is_repeated(number):
            return
        if self._installed and not self._was_ordered:
            self._was_ordered = True
            self._stay_while_fresh()
            self._drain("SIGTERM")
        else:
            _set_handler(number, self._next)
            signal.raise_signal(number)

    def _stay_while_fresh(self) -> None:
        """Hide repetitions of the signal from a handler that the script sets or restores meanwhile.
        To the script its handler seems installed; the handler receives the second SIGTERM."""
        set_before, get_before = signal.signal, signal.getsignal

        def set_next(number: int, handler: Handler) -> Handler:
            takes_over = isinstance(getattr(handler, "__self__", None), DrainSignal)
            if number != signal.SIGTERM or takes_over or not self._orders.is_fresh:
                return set_before(number, handler)
            before = get_next(number)
            set_before(number, self._handle)
            self._next = handler
            return before

        def get_next(number: int) -> Handler:
            handler = get_before(number)
            return self._next if handler == self._handle else handler

        signal.signal, signal.getsignal = set_next, get_next  # type: ignore[assignment]

        def go() -> None:
            time.sleep(SAME_ORDER_S)
            if signal.signal is set_next:
                signal.signal, signal.getsignal = set_before, get_before
            if self._is_in_place and self._next == signal.SIG_DFL:
                # A handler in Python would never run if the main thread hangs.
                _set_by_libc(signal.SIGTERM, None)

        # At its end the interpreter resets Python's handlers to the default.
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
    mask: set[signal.Signals | int] | None = None
    """Signals that were blocked before the fork; None if DrainSignal is not installed."""


_forking = _Forking()


def _block_signal() -> None:
    """Block SIGTERM before a fork: a child that received it before `_reset_in_child` would lose it
    or drain."""
    if isinstance(getattr(_get_handler(signal.SIGTERM), "__self__", None), DrainSignal):
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_signal() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _reset_in_child() -> None:
    if _forking.mask is not None:
        forked = getattr(_get_handler(signal.SIGTERM), "__self__", None)
        if isinstance(forked, DrainSignal):
            forked.forget_order()
        _set_handler(signal.SIGTERM, signal.SIG_DFL)
    _unblock_signal()


os.register_at_fork(
    before=_block_signal, after_in_parent=_unblock_signal, after_in_child=_reset_in_child
)


def _is_free(handler: object) -> bool:
    """True if the script has no handler of its own. An earlier session's handler counts as none."""
    left_over = getattr(handler, "__self__", None)
    if isinstance(left_over, DrainSignal):
        return not left_over._installed and _is_free(left_over._next)
    return handler is signal.SIG_DFL
