"""Identity of a member."""

from dataclasses import dataclass, field

from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token


@dataclass(frozen=True, kw_only=True)
class Identity:
    spec: pb.JobSpec
    member_id: str
    incarnation: str = field(repr=False)
    """Secret UUID of the process."""
    public_id: str
    """Public id, as in rosters."""
    info: pb.MemberInfo
    job_secret: str = field(default="", repr=False)
    """Set by the job's first member; empty: none."""

    def token(self, generation: int) -> Token:
        """The fencing token for a generation; 0: none yet."""
        return Token(
            job=self.spec.job,
            generation=generation,
            member_id=self.member_id,
            incarnation=self.incarnation,
            job_secret=self.job_secret,
        )

    def is_in(self, roster: pb.Roster) -> bool:
        """True if this process is in the roster, not another one of its name."""
        own_id, own_process = self.member_id, self.public_id
        # Only one of possibly thousands of entries has this member's name.
        return any(e.member_id == own_id and e.public_id == own_process for e in roster.entries)

    def attend_request(self, generation: int) -> pb.AttendRequest:
        """Request that opens the stream of notices."""
        return pb.AttendRequest(
            protocol=OWN_PROTOCOLS.newest,
            oldest_protocol=OWN_PROTOCOLS.oldest,
            token=self.token(generation),
            spec=self.spec,
            info=self.info,
        )
