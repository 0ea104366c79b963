"""Time limits, all computed from a few numbers. Their order is checked, since a limit out of order
shows as a fault far from its cause."""

import math
from dataclasses import dataclass

MIN_HEARTBEAT_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits in seconds. Only `heartbeat_s`, `join_s`, `collective_s` and
    `wait_for_members_s` are settings. Raises ValueError for a value out of range, or limits that
    are not in order."""

    heartbeat_s: float = 0.5
    """Seconds between heartbeats. Lower values detect a silent loss sooner and cost more."""
    join_s: float = 120.0
    """Seconds after which a newcomer without a generation gets an error with the reason. The limits
    on forming a generation, on bringing a generation up and on leaving follow from this setting."""
    collective_s: float = 0.0
    """Seconds after which a collective counts as hung, and within which a trainer has to stop after
    its generation broke. 0: a quarter of --join-s."""
    wait_for_members_s: float | None = None
    """Seconds for which the members of a job that has trained wait while they are fewer than --min.
    Then they all end, and the job's state is lost with them, unless there is a checkpoint. By
    default there is no limit."""

    def __post_init__(self) -> None:
        if not self.heartbeat_s >= MIN_HEARTBEAT_S:
            raise ValueError(
                f"bad --heartbeat-s; saw {self.heartbeat_s:g}; expected at least {MIN_HEARTBEAT_S}"
            )
        if not self.collective_s >= 0:
            raise ValueError(
                f"bad --collective-s; saw {self.collective_s:g}; expected seconds above 0,"
                " or 0 for a quarter of --join-s"
            )
        wait_s = self.wait_for_members_s
        if wait_s is not None and not wait_s > 0:
            raise ValueError(
                f"bad --wait-for-members-s; saw {wait_s:g}; expected seconds above 0,"
                " or nothing, for no limit"
            )
        if wait_s == math.inf:
            object.__setattr__(self, "wait_for_members_s", None)
        if not self.collective_s:
            object.__setattr__(self, "collective_s", self.join_s / 4)
        for smaller, larger in self.hierarchy():
            if not smaller[1] < larger[1]:
                raise ValueError(
                    f"{smaller[0]} ({smaller[1]:g} s) must stay below"
                    f" {larger[0]} ({larger[1]:g} s)."
                    f" --join-s is {self.join_s:g}, --collective-s {self.collective_s:g},"
                    f" --heartbeat-s {self.heartbeat_s:g}. {_remedy(smaller[0])}"
                )

    def hierarchy(self) -> tuple[tuple[tuple[str, float], tuple[str, float]], ...]:
        """Return the pairs (smaller, larger) of limits in their order, each a name and its
        seconds."""
        forming = self.last_call_s + self.prepare_s + self.bring_up_s
        return (
            (("3 x heartbeat_s", 3 * self.heartbeat_s), ("lease_s", self.lease_s)),
            (("lease_s", self.lease_s), ("silence_s", self.silence_s)),
            (("silence_s", self.silence_s), ("collective_s", self.collective_s)),
            (("collective_s", self.collective_s), ("watchdog_s", self.watchdog_s)),
            (("watchdog_s", self.watchdog_s), ("join_s", self.join_s)),
            (("last_call_s + prepare_s + bring_up_s", forming), ("join_s", self.join_s)),
        )

    @property
    def reconnect_s(self) -> float:
        """Time for a member to open its broken stream again before the member is lost."""
        return 2 * self.heartbeat_s

    @property
    def halt_s(self) -> float:
        """Time for which a signal may halt a process (SIGSTOP) before its member is lost."""
        return self.heartbeat_s / 4

    @property
    def lease_s(self) -> float:
        """A member without a heartbeat for this long is lost, if its heartbeats were even."""
        return 4 * self.heartbeat_s

    @property
    def silence_s(self) -> float:
        """A member without a heartbeat for this long is lost, even if its heartbeats were uneven
        before."""
        return (self.lease_s + self.collective_s) / 2

    @property
    def gather_s(self) -> float:
        """Time for which a running job waits for more changes after the first one: members that
        join or leave."""
        return self.heartbeat_s / 2

    @property
    def last_call_s(self) -> float:
        """Time from the first proposal after which a first generation forms without the desired
        members that are still missing, if it has enough."""
        return self.join_s / 4

    @property
    def prepare_s(self) -> float:
        """Time to accept or reject a roster, counted anew at each answer, up to `join_s` in all."""
        return self.join_s / 12

    @property
    def probe_s(self) -> float:
        """Time for a member to reach each of its peers; part of the time to accept or reject."""
        return self.prepare_s / 4

    @property
    def drain_s(self) -> float:
        """Time for which a leaving member waits for a generation without it to be agreed."""
        return self.join_s / 4

    @property
    def bring_up_s(self) -> float:
        """Time from a committed roster until every member's first collective has passed, counted
        anew whenever a member reports progress. A planned change has `collective_s` more at first,
        to reach the boundary."""
        return self.join_s / 4

    @property
    def longest_bring_up_s(self) -> float:
        """The longest that a bring-up may take, even if it makes progress."""
        return 720 * self.bring_up_s

    @property
    def watchdog_s(self) -> float:
        """A process counts as hung if none of its threads has run for this long."""
        return 2 * self.collective_s


def _remedy(smaller: str) -> str:
    if smaller == "collective_s":
        return "Raise --join-s or lower --collective-s."
    return "Raise --join-s or --collective-s, or lower --heartbeat-s."
