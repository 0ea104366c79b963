"""The clock of a coordinator, for times that it compares with each other. Events, readings and
snapshots have the system's time."""

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Unix seconds that never jump: the system's clock may be set, and runs on while the host is
    suspended."""
    return _OFFSET_S + time.monotonic()
