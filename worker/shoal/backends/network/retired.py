"""Gloo groups of past generations, freed once no operation runs in them.

Freeing a group waits for its operations, and an operation that was cut in the middle of a write may
never end. So a separate thread frees groups, without holding the GIL.
"""

import atexit
import ctypes
import threading
import time
from collections.abc import Iterable
from typing import Any

import structlog

log = structlog.get_logger(__name__)

RETIRED_S = 1.0
"""Delay before a group is freed, so that its peers do not need the group any more."""
EXIT_S = 2.0
"""Time for which the process' exit waits for operations."""

_free_at_once = threading.Event()
_threads: list[threading.Thread] = []


def retire(groups: list[Any]) -> None:
    """Free the groups in a thread. The list must hold their last references, and is emptied."""
    thread = threading.Thread(target=_free, args=(groups,), name="shoal-free-group", daemon=True)
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    thread.start()


def keep_for_ever(groups: Iterable[Any]) -> None:
    """Never free these groups, as freeing would wait for ever. Costs memory and a thread."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def free_now(limit_s: float) -> bool:
    """Free all remaining groups now; return True if that succeeded within `limit_s`."""
    waiting = [each for each in _threads if each.is_alive()]
    if not waiting:
        return True
    deadline_s = time.monotonic() + limit_s
    _free_at_once.set()
    for thread in waiting:
        thread.join(max(deadline_s - time.monotonic(), 0))
    _free_at_once.clear()
    return not any(each.is_alive() for each in waiting)


def _free(groups: list[Any]) -> None:
    _free_at_once.wait(RETIRED_S)
    groups.clear()


def _at_exit() -> None:
    # The interpreter would wait without a limit.
    if not free_now(EXIT_S):
        log.warning("groups_not_freed", reason=f"an operation did not end within {EXIT_S:g} s")


atexit.register(_at_exit)
