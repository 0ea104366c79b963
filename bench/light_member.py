"""Simulated members, ten thousand in a few processes: the protocol up to the committed record.

The core of a real worker searches the roster for its own entry and hashes the roster: some 20 ms
for ten thousand members, which is little on each of ten thousand machines, but too much on this
one. Here a process does both once for all its members. The network traffic is the same: each host
fetches each roster once.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.deflated import unpack
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub


@dataclass(kw_only=True)
class Host:
    """Shared state of the members of one host."""

    digest: str = ""
    """Digest of the roster that the host fetched last."""
    packed: bytes = b""
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_bytes: int = 0
    """Bytes of the rosters that the host fetched."""

    async def get(self, job: str, digest: str, stub: MembershipStub) -> None:
        """Fetch the roster, unless it is the one that was fetched last."""
        async with self.fetching:
            if self.digest != digest:
                reply = await stub.GetRoster(pb.GetRosterRequest(job=job, digest=digest))
                self.digest, self.packed = digest, reply.roster
                self.num_bytes += len(reply.roster)


class Rosters:
    """Members of the rosters that this process has unpacked, by digest."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, str]] = {}

    def members(self, shown: pb.Prepare, host: Host) -> dict[str, str]:
        """Public ids by name. Raises RuntimeError for a roster of another digest."""
        digest = shown.digest
        if digest not in self._members:
            roster = shown.roster if shown.roster.entries else unpack(pb.Roster, host.packed)
            if roster_digest(roster) != digest:
                raise RuntimeError("a roster has another digest than its notice names")
            self._members[digest] = {e.member_id: e.public_id for e in roster.entries}
        return self._members[digest]


@dataclass
class LightTrack:
    generation: int = 0
    step: int = 0


class LightMember:
    """A light replacement of `MemberCore`."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.track = LightTrack()
        self.accepted = ""
        """Digest of the roster that the member accepted last."""
        self.record: pb.GenerationRecord | None = None
        """The newest committed record of a roster that the member accepted."""

    @property
    def token(self) -> Token:
        return self.identity.token(self.track.generation)

    def step(self, event: ev.Event, now_s: float) -> Sequence[ev.Effect]:
        match event:
            case ev.JoinWanted():
                return [ev.OpenStream(request=self.identity.attend_request(0))]
            case ev.ProposalMade():
                proposes = pb.ProposeRequest(token=self.token, proposal=event.proposal)
                return [self._call(proposes)]
            case ev.RosterValidated():
                self.accepted = event.digest
                generation, digest = event.generation, event.digest
                answers = pb.AnswerRequest(token=self.token, generation=generation, digest=digest)
                return [self._call(answers)]
            case ev.TrainerStopped():
                stands = pb.SettleRequest(
                    token=self.token, step=event.step, has_state=event.has_state
                )
                return [self._call(stands)]
            case ev.GenerationBroughtUp():
                generation = event.record.roster.generation
                token = self.identity.token(generation)
                self.track.generation = generation
                return [self._call(pb.ReadyRequest(token=token, step=0))]
        return []

    @staticmethod
    def _call(request: ev.Request) -> ev.CallLeader:
        rule = ev.Persistence.UNTIL_ANSWERED
        return ev.CallLeader(request=request, persistence=rule, timeout_s=60.0)
