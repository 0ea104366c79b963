"""The clock of a coordinator, for all times that it compares, counts from or shows. In files, such
as a snapshot's, it writes the system's time."""

import time

_OFFSET_S = time.time() - time.monotonic()


def unix_s() -> float:
    """Unix seconds that never jump: the system's clock may be set, and runs on while the host is
    suspended."""
    return _OFFSET_S + time.monotonic()
