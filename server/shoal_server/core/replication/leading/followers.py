"""A server that has, or is to have, a copy of a shard that is led here."""

from dataclasses import dataclass, field
from enum import Enum

from shoal_server.core.shards.assignments import Holder

NEARLY_LEVEL = 8
"""Updates that a joiner may lack when pushes begin to wait for it."""
MAX_ROUNDS = 3
"""Times that it may fall behind by more before that, while it catches up."""


class FollowerPhase(Enum):
    UNLINKED = "there is no link to it"
    OFFERED = "it was asked what it has"
    CONTINUING = "its copy is the beginning of what is led here"
    IMAGE = "it waits for an image, or is getting one"
    FOLLOWING = "it gets every push"


@dataclass(slots=True)
class Follower:
    holder: Holder
    phase: FollowerPhase = FollowerPhase.UNLINKED
    received: int = 0
    """Up to which version its process has the shard, of this epoch's history; it may not have read
    the last of it yet."""
    confirmed: int = 0
    """Up to which version it has said that it has."""
    counts: bool = False
    """It is joining, and nothing is acknowledged any more that it has not."""
    is_admitting: bool = False
    """A write is under way that may put it in step."""
    image_version: int | None = 0
    """What is applied after it follows the image; None: there is no image of it yet."""
    _goal: int = 0
    """The version to reach: to count, then to be put in step."""
    _rounds: int = 0
    _ahead: set[int] = field(default_factory=set)
    """Versions in its memory, some before which may still be on their way."""

    def begin(self, received: int, version: int) -> None:
        """Every push is sent to it from here on; the primary is at that version."""
        self.phase = FollowerPhase.FOLLOWING
        self.heard(received)
        self._goal, self._rounds = version, 0

    def needs_from(self, version: int) -> int:
        """Up to which version it has, or is getting, the shard otherwise; `version`: as of now."""
        if self.phase is FollowerPhase.IMAGE and self.image_version is None:
            return version
        return max(self.confirmed, self.image_version or 0)

    def unlink(self) -> None:
        """What was on its way may be lost. What it has, it has."""
        self._ahead.clear()
        self.phase = FollowerPhase.UNLINKED
        self.counts = False

    def heard(self, received: int) -> bool:
        """It says that it has everything up to that version; whether that is news."""
        if received <= self.confirmed:
            return False
        self.confirmed = received
        self.received = max(self.received, received)
        self._go_on()
        return True

    def holds(self, version: int) -> bool:
        """Its process has that version in its memory; whether it is known to have more by that: all
        before it must have come, too."""
        before = self.received
        if self.phase is FollowerPhase.FOLLOWING:
            self._ahead.add(version)
            self._go_on()
        return self.received > before

    def _go_on(self) -> None:
        """What is known to be in its memory counts once nothing before it is missing."""
        while self.received + 1 in self._ahead:
            self.received += 1
        self._ahead = {version for version in self._ahead if version > self.received}

    def forget(self) -> None:
        """It has nothing that is of any use."""
        self.received = self.confirmed = 0
        self.image_version = None
        self._ahead.clear()

    def draw_level(self, version: int) -> bool:
        """See whether a joiner is to count now; whether that changed.

        What was pushed while its image was on its way follows it first: nobody waits for that."""
        if self.counts or self.phase is not FollowerPhase.FOLLOWING or self.confirmed < self._goal:
            return False
        self.counts = version - self.confirmed <= NEARLY_LEVEL or self._rounds >= MAX_ROUNDS
        self._goal, self._rounds = version, self._rounds + 1
        return self.counts

    @property
    def is_level(self) -> bool:
        """Whether a joiner that counts has all that may have been acknowledged without it."""
        return self.counts and self.confirmed >= self._goal
