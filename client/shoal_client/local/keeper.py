"""Restarts, within bounds, of a part of a local cluster that has ended."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from shoal_client.local.process import KILLED_S, Process
from shoal_proto.errors import InvalidSpec, ShoalError, Unavailable
from shoal_proto.exit_codes import describe_exit

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Policy for restarting a part that ended."""

    max_failures: int = 5
    """Ends in a row, each within `settled_s`, after which the cluster is given up."""
    settled_s: float = 20.0
    """Service after which the count of ends starts over."""
    first_pause_s: float = 0.1
    """Pause before the first restart; doubled after each further end in a row."""

    def __post_init__(self) -> None:
        if self.max_failures < 1 or min(self.settled_s, self.first_pause_s) < 0:
            raise InvalidSpec(
                "bad restart policy",
                seen=str(self),
                expected="max_failures of 1 or more, and no negative time",
            )

    def pause_s(self, failures: int) -> float:
        """Pause after `failures` ends in a row."""
        return self.first_pause_s * 2.0 ** (failures - 1)


class NotStarted(Unavailable):
    """A part was started and does not serve. `exit_code`: None if it has not ended."""

    def __init__(self, what: str, *, seen: str, fix: str, exit_code: int | None) -> None:
        super().__init__(what, seen=seen, fix=fix)
        self.exit_code = exit_code


class Keeper:
    """A part, and the thread that waits for its end. `start(failures)` starts the part again and
    returns once it serves. `give_up` is called once, with the part's name and the reason, if the
    part does not stay up. The functions run on the keeper's thread.

    A part that ends with EX_TEMPFAIL could not reach a service outside the cluster. It is started
    again without a limit, and without a longer pause: the part has waited itself.
    """

    def __init__(
        self,
        process: Process,
        start: Callable[[int], Process],
        policy: RestartPolicy,
        *,
        say: Callable[[str], None],
        give_up: Callable[[str, str], None],
    ) -> None:
        self._process = process
        self._start = start
        self._policy = policy
        self._say = say
        self._give_up = give_up
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, name=f"shoal-keep-{process.name}", daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Do not start the part again: its next end is intended."""
        self._released.set()

    def join(self) -> None:
        """Wait for the thread; call it once the part was released and has ended. A part that hangs
        in the kernel is waited for until KILLED_S have passed."""
        self._thread.join(KILLED_S)

    def _keep(self) -> None:
        name, failures, serves_since_s, logged = self._process.name, 0, time.monotonic(), ""
        seen, code = self._await_end()
        while not self._released.is_set():
            if time.monotonic() - serves_since_s >= self._policy.settled_s:
                failures = 0
            failures = max(1, failures + (code != os.EX_TEMPFAIL))
            if code != os.EX_TEMPFAIL and failures >= self._policy.max_failures:
                self._give_up(
                    name,
                    f"{name} cannot stay up: it {seen}, as the last of {failures} ends in a row",
                )
                return
            if seen != logged or code != os.EX_TEMPFAIL:
                logged = seen
                self._report(f"{name} {seen}; starting it again")
            if self._released.wait(self._policy.pause_s(failures)):
                return
            try:
                self._process = self._start(failures)
            except (ShoalError, OSError) as error:
                serves_since_s = time.monotonic()
                seen = f"did not come up again ({getattr(error, 'seen', '') or error})"
                code = error.exit_code if isinstance(error, NotStarted) else None
                continue
            serves_since_s, logged = time.monotonic(), ""
            self._report(f"{name} serves again")
            seen, code = self._await_end()

    def _report(self, text: str) -> None:
        # A full disk of the messages must not prevent a restart.
        with suppress(OSError):
            self._say(text)

    def _await_end(self) -> tuple[str, int | None]:
        code = self._process.wait()
        assert code is not None
        return describe_exit(code), code
