"""Timed blocks of steps, each of which waits for its turn; `turns.py` starts and reads them.

This module imports none of the measured systems.
"""

import json
import os
import sys
import time
from itertools import pairwise


class Blocks:
    """Steps of one rank in blocks of equal length. A block begins when a line arrives on standard
    input. At its end, a line goes to the descriptor: the seconds between its timed steps, and the
    mean CPU time of one of them."""

    def __init__(self, descriptor: int, num_blocks: int, num_skipped: int, num_timed: int) -> None:
        """`num_skipped`: steps at the beginning of each block that are not timed."""
        self._descriptor = descriptor
        self._num_skipped = num_skipped
        self._num_steps = num_skipped + num_timed + 1
        """`num_timed` + 1: there are n - 1 intervals between n steps."""
        self.num_steps = num_blocks * self._num_steps
        """Steps of all blocks."""
        self._ended_s: list[float] = []
        self._cpu_s = 0.0

    @property
    def is_open(self) -> bool:
        """True if a block has begun and not ended."""
        return bool(self._ended_s)

    def before_step(self) -> None:
        """Called before each step; before the first step of a block, waits until it may begin."""
        if not self.is_open and not sys.stdin.buffer.readline():
            raise SystemExit("the measurement has ended")

    def after_step(self) -> None:
        """Called after each step."""
        self._ended_s.append(time.perf_counter())
        if len(self._ended_s) == self._num_skipped + 1:
            self._cpu_s = time.process_time()
        if len(self._ended_s) == self._num_steps:
            self._report()

    def _report(self) -> None:
        ended_s, self._ended_s = self._ended_s[self._num_skipped :], []
        gaps_s = [after - before for before, after in pairwise(ended_s)]
        cpu_s = (time.process_time() - self._cpu_s) / len(gaps_s)
        line = json.dumps({"gaps_s": gaps_s, "cpu_s": cpu_s}) + "\n"
        with os.fdopen(os.dup(self._descriptor), "w") as file:
            file.write(line)
