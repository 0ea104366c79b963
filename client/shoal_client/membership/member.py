"""Who joins a job."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_client.liveness.beat_board import BeatSlot
from shoal_proto.v1 import membership_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who joins what, and where the coordinators are."""

    coordinators: Sequence[str]
    """host:port of every coordinator replica."""
    spec: pb.JobSpec
    member_id: str
    incarnation: str
    info: pb.MemberInfo
    beat_slot: BeatSlot | None = None
    """Where this host's launcher looks for whom to beat. Without it the member beats by itself."""


__all__ = ["Member"]
