"""Interface between a session and a transport."""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from shoal.torch_private.c10d import Store
from shoal_proto.errors import GenerationBroken, InternalError, InvalidSpec

LONGEST_S = 24 * 3600.0
"""Time limit of a transport's operations if the session itself detects hangs."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Rank and address of one member in the group of a generation."""

    generation: int
    rank: int
    world_size: int
    address: str
    bring_up_s: float
    collective_s: float


class Group(Protocol):
    """The group of one generation. It is made without I/O, so that it can be cut at any moment."""

    def open(self) -> dist.ProcessGroup:
        """Connect to the other members, and become torch.distributed's default group.

        Raises GenerationBroken if the group is cut meanwhile, RuntimeError if a peer does not
        connect, and InvalidSpec if torch has a default group already or ranks share a GPU.
        """

    def cut(self, reason: str) -> None:
        """End every present and later operation: either it raises, or `check` does. Thread-safe,
        quick."""

    def check(self) -> None:
        """Raise GenerationBroken if a collective may have ended with an incomplete result.

        Called before results change the state permanently. On a device, this call waits for all
        queued work.
        """

    def retire(self) -> None:
        """Stop being the default group, and free the group once no operation runs in it.

        Does not disturb peers' operations, unless the group was cut.
        """

    def keep_for_ever(self) -> None:
        """Never free the group: an operation in it may not end, and freeing would wait for it."""


class Backend(Protocol):
    """Factory of groups."""

    name: str
    is_watched: bool
    """True if the session detects hangs; otherwise the transport's time limits do."""

    def group(self, seat: Seat, store: Store) -> Group: ...

    def stalled_since_s(self, now_s: float) -> float | None:
        """Return the time (`time.monotonic`) since which the device has made no progress. None if
        it advances, or if there is no device besides the host."""

    def is_failure(self, error: BaseException) -> bool:
        """True if the error comes from a failed collective, not from the script's own code."""


class _NoBackend:
    name = "none"
    is_watched = False

    def group(self, seat: Seat, store: Store) -> Group:
        raise InternalError("a strategy was given no backend", expected="use_backend before enter")

    def stalled_since_s(self, now_s: float) -> float | None:
        return None

    def is_failure(self, error: BaseException) -> bool:
        return False


NO_BACKEND = _NoBackend()


def ended_in_bring_up(generation: int, reason: str) -> GenerationBroken:
    """Return the error for a generation that ended during its bring-up."""
    what = f"generation {generation} ended while it was brought up"
    return GenerationBroken(what, seen=reason)


def refuse_default_group() -> None:
    """Raise InvalidSpec if torch.distributed has a default group."""
    if dist.is_initialized():
        backend = dist.get_backend()
        if backend.startswith("shoal"):
            raise InvalidSpec(
                "another session of this process is still training",
                seen=f"its default process group, of the backend {backend}",
                expected="one session at a time",
                fix="Leave the `with` block of that session before the first batch of this one.",
            )
        raise InvalidSpec(
            "torch.distributed has a default process group already",
            seen=f"a group of the backend {backend}, which Shoal did not make",
            expected="none",
            fix="Leave init_process_group to session.distribute(); it is called for you.",
        )
