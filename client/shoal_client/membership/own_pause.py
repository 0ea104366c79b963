"""A pause of this member's own."""

from dataclasses import dataclass, replace

from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token


@dataclass(frozen=True, kw_only=True)
class OwnPause:
    """What this member said of its pause, and since when it lasts."""

    reason: str
    limit_s: float
    since_s: float
    number: int
    """From 1, of this process' pauses."""
    over: bool = False

    def ended(self) -> "OwnPause":
        """The same, over."""
        return replace(self, over=True)

    def request(self, token: Token, now_s: float) -> pb.PauseRequest:
        """What tells of it now; a new leader learns by it how much of the limit is left."""
        return pb.PauseRequest(
            token=token,
            paused=not self.over,
            reason=self.reason[:1000],
            limit_s=self.limit_s,
            elapsed_s=now_s - self.since_s,
            pause_number=self.number,
        )
