"""The threads of a membership, none of which ends without a word."""

import threading
import time
from collections.abc import Callable

import structlog

from shoal_proto.errors import InternalError, ShoalError

log = structlog.get_logger(__name__)


class SessionThreads:
    """They end when `closing` is set, or one by one with an error: its own, or its script's."""

    def __init__(self, on_failure: Callable[[ShoalError], None]) -> None:
        """`on_failure` is told, on the thread, of one that can do its work no more."""
        self._on_failure = on_failure
        self.closing = threading.Event()
        self.running: list[threading.Thread] = []

    def start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(name, target), name=name, daemon=True)
        self.running.append(thread)
        thread.start()

    def join(self, within_s: float | None = None) -> None:
        """Wait for them, for `within_s` at the most."""
        give_up_s = None if within_s is None else time.monotonic() + within_s
        for thread in self.running:
            if thread is not threading.current_thread():
                thread.join(None if give_up_s is None else max(0.0, give_up_s - time.monotonic()))

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except ShoalError as error:
            self._on_failure(error)
        except Exception as error:
            log.exception("thread_failed", thread=name)
            failure = InternalError(
                f"a thread of the membership failed: {name}",
                seen=repr(error),
                fix="The log has where it failed. If it is your storage or network that failed,"
                " start the worker again; if it is Shoal, please report it.",
            )
            failure.__cause__ = error
            self._on_failure(failure)
