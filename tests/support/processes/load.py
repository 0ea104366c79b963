"""Factor by which this machine is slower just now, for tests with tight limits."""

import os
from pathlib import Path

MOST = 10.0


def unhurried(seconds: float) -> float:
    """Return the time for an idle machine, extended if more processes want to run than there are
    cores."""
    return seconds * min(MOST, max(1.0, _wanted() / (os.cpu_count() or 1)))


def _wanted() -> float:
    """Threads that run or want to: over the last minute, or at this moment if there are more."""
    one_minute, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    return max(float(one_minute), float(running.partition("/")[0]))


__all__ = ["unhurried"]
