"""A server that has, or is getting, a copy of a shard led by this server."""

from dataclasses import dataclass, field
from enum import Enum

from shoal_server.core.processes import Holder

NEARLY_LEVEL = 8
"""Maximum number of updates that a joiner (a follower that is to become a backup) may lack when
pushes begin to wait for it."""
MAX_ROUNDS = 3
"""Rounds of catching up after which pushes wait for a joiner that lacks more than NEARLY_LEVEL."""


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
    """Version up to which the follower's process has this epoch's records in memory. The process
    may not have read the last of them yet."""
    confirmed: int = 0
    """Version up to which the follower has confirmed all records."""
    counts: bool = False
    """True if the follower is joining and pushes wait for its acknowledgement."""
    is_admitting: bool = False
    """True if a write is in progress that may put the follower in step."""
    image_version: int | None = 0
    """Version of the image or copy with which the follower begins, and after which records follow;
    None: it waits for an image."""
    _goal: int = 0
    """Version that the follower must reach, first to count, then to be put in step."""
    _rounds: int = 0
    _ahead: set[int] = field(default_factory=set)
    """Versions beyond `received` in the memory of the follower's process; an earlier version may
    still be in transit."""

    def begin(self, received: int, version: int) -> None:
        """Start following: every later push is sent to the follower. `received`: version up to
        which the follower has all records; `version`: the primary's version."""
        self.phase = FollowerPhase.FOLLOWING
        self.note_received(received)
        self._goal, self._rounds = version, 0

    def needs_records_after(self, version: int) -> int:
        """Version after which the follower needs records; `version`: the primary's current one."""
        if self.phase is FollowerPhase.IMAGE and self.image_version is None:
            return version
        return max(self.confirmed, self.image_version or 0)

    def unlink(self) -> None:
        """Note that the link is gone: records in transit may be lost, received ones are not."""
        self._ahead.clear()
        self.phase = FollowerPhase.UNLINKED
        self.counts = False

    def note_received(self, received: int) -> bool:
        """Note that the follower confirmed all records up to a version; True if that is new."""
        if received <= self.confirmed:
            return False
        self.confirmed = received
        self.received = max(self.received, received)
        self._go_on()
        return True

    def note_held_version(self, version: int) -> bool:
        """Note that the follower's process has a version in memory. Return True if `received`
        rises, which also needs all earlier versions."""
        before = self.received
        if self.phase is FollowerPhase.FOLLOWING:
            self._ahead.add(version)
            self._go_on()
        return self.received > before

    def _go_on(self) -> None:
        """Raise `received` over the versions in memory, up to the first that is missing."""
        while self.received + 1 in self._ahead:
            self.received += 1
        self._ahead = {version for version in self._ahead if version > self.received}

    def forget(self) -> None:
        """Note that the follower has no useful copy of the shard."""
        self.received = self.confirmed = 0
        self.image_version = None
        self._ahead.clear()

    def try_catch_up(self, version: int) -> bool:
        """Give a joiner that has reached its goal the next one, and set `counts` if it is nearly
        level or has had MAX_ROUNDS goals. Return True if `counts` was set: pushes then wait for the
        joiner.

        Pushes made during the transfer of its image are sent first, and do not wait for the joiner.
        """
        if self.counts or self.phase is not FollowerPhase.FOLLOWING or self.confirmed < self._goal:
            return False
        self.counts = version - self.confirmed <= NEARLY_LEVEL or self._rounds >= MAX_ROUNDS
        self._goal, self._rounds = version, self._rounds + 1
        return self.counts

    @property
    def is_caught_up(self) -> bool:
        """True if a joiner counts, and has all records that may be acknowledged without it."""
        return self.counts and self.confirmed >= self._goal
