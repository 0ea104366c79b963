"""Time limit for the start of a part of a local cluster, extended while it makes progress."""

import os
from pathlib import Path

MOST_S = 600.0
"""Limit even with progress, unless `timeout_s` is longer."""
LEAST_SHARE = 1 / 60
"""Fraction of a core's time that counts as progress: a hung part uses less."""
_TICKS_A_S = os.sysconf("SC_CLK_TCK")
ADVICE = "If this machine is busy or its disk is slow, run the command again later."


class StartTime:
    """Time limit of one start."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        """`timeout_s`: maximum time without progress."""
        self._timeout_s = timeout_s
        self._began_s = self._since_s = now_s
        self._cpu_s = 0.0

    def why_over(self, now_s: float, cpu_s: float) -> str:
        """The reason to give the start up; empty while there is time left."""
        if now_s - self._began_s > max(MOST_S, self._timeout_s):
            return f"not up in {now_s - self._began_s:.0f} s, with {cpu_s:.1f} s of CPU"
        if now_s - self._since_s <= self._timeout_s:
            return ""
        if cpu_s - self._cpu_s < LEAST_SHARE * (now_s - self._since_s):
            return (
                f"not up in {now_s - self._began_s:.0f} s, and no progress in the last"
                f" {now_s - self._since_s:.0f}: it used {cpu_s - self._cpu_s:.1f} s of CPU"
            )
        self._since_s, self._cpu_s = now_s, cpu_s
        return ""


def cpu_s(pid: int) -> float:
    """The CPU seconds that a process has used; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_S
