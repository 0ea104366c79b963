"""A server that has, or is getting, a copy of a shard led here."""

from dataclasses import dataclass, field
from enum import Enum

from shoal_server.core.processes import Holder

NEARLY_LEVEL = 8
"""Updates that a joiner (a follower that is to become a backup) may lack when pushes begin to wait
for it."""
MAX_ROUNDS = 3
"""Rounds of catching up after which pushes wait for a joiner in any case."""


class FollowerPhase(Enum):
    UNLINKED = "there is no link to the follower"
    OFFERED = "the follower was asked for the state of its copy"
    CONTINUING = "the follower's copy is an earlier version of the shard led here"
    IMAGE = "the follower waits for an image, or is getting one"
    FOLLOWING = "the follower gets every push"


@dataclass(slots=True)
class Follower:
    holder: Holder
    phase: FollowerPhase = FollowerPhase.UNLINKED
    received: int = 0
    """Version up to which the follower's process has the records in memory, perhaps not read yet.
    """
    confirmed: int = 0
    """Version up to which the follower has confirmed all records."""
    counts: bool = False
    """True for a joiner that pushes wait for."""
    is_admitting: bool = False
    """True while a write may put the follower in step."""
    image_version: int | None = 0
    """Version of the image, or of the existing copy, that later records are added to; None: no
    image was requested yet."""
    _goal: int = 0
    """Version to reach: first to count, then to be put in step."""
    _rounds: int = 0
    _ahead: set[int] = field(default_factory=set)
    """Versions beyond `received` in memory of the follower's process."""

    def begin(self, received: int, version: int) -> None:
        """Send every later push to the follower. `received`: what the follower has; `version`: the
        primary's version."""
        self.phase = FollowerPhase.FOLLOWING
        self.note_received(received)
        self._goal, self._rounds = version, 0

    def needs_records_after(self, version: int) -> int:
        """Version after which the follower needs records; `version`: the primary's."""
        if self.phase is FollowerPhase.IMAGE and self.image_version is None:
            return version
        return max(self.confirmed, self.image_version or 0)

    def unlink(self) -> None:
        """Note that the link is gone. Records in transit may be lost, received ones are not."""
        self._ahead.clear()
        self.phase = FollowerPhase.UNLINKED
        self.counts = False

    def note_received(self, received: int) -> bool:
        """Note that the follower confirmed all records up to a version; True if this is new."""
        if received <= self.confirmed:
            return False
        self.confirmed = received
        self.received = max(self.received, received)
        self._go_on()
        return True

    def note_held_version(self, version: int) -> bool:
        """Note a version in memory of the follower's process. True if `received` rises."""
        before = self.received
        if self.phase is FollowerPhase.FOLLOWING:
            self._ahead.add(version)
            self._go_on()
        return self.received > before

    def _go_on(self) -> None:
        while self.received + 1 in self._ahead:
            self.received += 1
        self._ahead = {version for version in self._ahead if version > self.received}

    def forget(self) -> None:
        self.received = self.confirmed = 0
        self.image_version = None
        self._ahead.clear()

    def try_catch_up(self, version: int) -> bool:
        """Give a joiner that has reached its goal the next one; set `counts` if it is nearly level
        or has had MAX_ROUNDS goals. True if `counts` was set.

        Pushes do not wait for the joiner before that.
        """
        if self.counts or self.phase is not FollowerPhase.FOLLOWING or self.confirmed < self._goal:
            return False
        self.counts = version - self.confirmed <= NEARLY_LEVEL or self._rounds >= MAX_ROUNDS
        self._goal, self._rounds = version, self._rounds + 1
        return self.counts

    @property
    def is_caught_up(self) -> bool:
        """True if a joiner counts and lacks no record acknowledged without it."""
        return self.counts and self.confirmed >= self._goal
