"""Activity of a member's trainer, as its heartbeats report it."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """A report of a trainer."""

    moved: int = 0
    """Changes as long as the bring-up makes progress."""
    waits: bool = False
    """True if the trainer waits for other members."""
    own_code_since_ns: int = 0
    """Time by CLOCK_MONOTONIC; 0: not in the script's own code."""
    loads: bool = False
    """True if the script's own code waits for a batch."""

    @property
    def own_code_s(self) -> float:
        """Seconds in the script's own code; 0: not in it."""
        since_ns = self.own_code_since_ns
        return max(time.monotonic_ns() - since_ns, 0) / 1e9 if since_ns else 0.0
