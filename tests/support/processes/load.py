"""Time limits extended by the present load of this machine, for tests with tight limits."""

import os
from pathlib import Path

MOST = 10.0


def unhurried(seconds: float) -> float:
    """Return the time for an idle machine, extended if there are more runnable threads than
    cores."""
    return seconds * min(MOST, max(1.0, _wanted() / (os.cpu_count() or 1)))


def _wanted() -> float:
    """Number of runnable threads: the last minute's mean, or the current number if larger."""
    one_minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    return max(float(one_minute), float(running.partition("/")[0]))


__all__ = ["unhurried"]
