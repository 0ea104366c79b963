"""Rosters of many members, of which a notice has only the head: put together from chunks.

A member keeps the chunks of its newest roster, so that of the next one it lacks those that changed;
these it takes from the members of its host, or asks the coordinator for.
"""

import threading
from collections.abc import Mapping, Sequence
from functools import partial

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership import calls
from shoal_client.membership.member import Member
from shoal_client.membership.shared_chunks import SharedChunks
from shoal_proto.digest import roster_digest
from shoal_proto.errors import InternalError, MalformedMessage, Unavailable, UnknownGeneration
from shoal_proto.packing.roster_chunks import assembled, digest_of, digests
from shoal_proto.v1 import membership_pb2 as pb


class NamedRosters:
    """Of one member. Used by the thread that holds its stream."""

    def __init__(
        self, coordinators: Coordinators, member: Member, closing: threading.Event
    ) -> None:
        """`closing` ends a wait for other members of the host."""
        self._coordinators = coordinators
        self._job = member.spec.job
        directory = member.shared_directory
        self._shared = SharedChunks(directory, closing) if directory is not None else None
        self._chunks: Mapping[bytes, bytes] = {}
        self._newest: tuple[str, pb.Roster] = ("", pb.Roster())

    def complete(self, notice: pb.Notice, timeout_s: float) -> pb.Notice:
        """The notice with its roster, if it is one that names a roster by its head.

        Raises Unavailable where the roster is over: on a new stream comes what there is to do now.
        """
        kind = notice.WhichOneof("kind")
        holder = getattr(notice, kind) if kind in ("prepare", "outcome") else None
        if holder is None or not holder.HasField("head"):
            return notice
        roster = self._roster(holder.head, holder.digest, timeout_s)
        holder.ClearField("head")
        holder.roster.CopyFrom(roster)
        return notice

    def _roster(self, head: pb.RosterHead, digest: str, timeout_s: float) -> pb.Roster:
        if self._newest[0] == digest:
            return self._newest[1]
        wanted = digests(head)
        chunks = {each: self._chunks[each] for each in wanted if each in self._chunks}
        missing = [each for each in wanted if each not in chunks]
        if missing:
            fetch = partial(self._fetch, timeout_s)
            chunks |= self._shared.get(missing, fetch) if self._shared else fetch(missing)
        try:
            roster = assembled(head, chunks)
        except MalformedMessage as error:
            raise InternalError(error.what, seen=error.seen, expected=error.expected) from error
        if (seen := roster_digest(roster)) != digest:
            raise InternalError(
                f"the chunks of generation {head.roster.generation} are not its roster",
                seen=f"digest {seen}",
                expected=f"digest {digest}",
            )
        self._chunks, self._newest = chunks, (digest, roster)
        return roster

    def _fetch(self, timeout_s: float, missing: Sequence[bytes]) -> Mapping[bytes, bytes]:
        request = pb.GetRosterChunksRequest(job=self._job, digests=missing)
        try:
            reply = self._coordinators.call(calls.get_roster_chunks, request, timeout_s=timeout_s)
        except UnknownGeneration as error:
            raise Unavailable(
                "the roster that a notice named is over", seen=str(error), fix="Attend again."
            ) from error
        found = {digest_of(chunk): chunk for chunk in reply.chunks}
        if lacks := [each for each in missing if each not in found]:
            raise InternalError(
                "the coordinator sent other chunks than it was asked for",
                seen=", ".join(each.hex()[:16] for each in list(found)[:5]),
                expected=", ".join(each.hex()[:16] for each in lacks[:5]),
            )
        return found
