"""Rosters that notices do not contain, but name by their digests."""

from collections import OrderedDict
from collections.abc import Callable

from shoal_client.membership.host_files import HostFiles
from shoal_proto.deflated import unpack
from shoal_proto.errors import InternalError, MalformedMessage, Unavailable, UnknownGeneration
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb

KEPT_ROSTERS = 2
"""The roster of the generation that trains, and the newest one sent."""
LOCK_WAIT_S = 2.0
"""Maximum wait for another member of the host that fetches a roster."""

Fetch = Callable[[str, float], bytes]
"""Fetches a packed roster, by its digest and a timeout in seconds."""


class Rosters:
    """Rosters of one member, for the thread that reads its stream."""

    def __init__(self, fetch: Fetch, shared: HostFiles | None = None) -> None:
        self._fetch = fetch
        self._shared = shared
        self._kept: OrderedDict[str, pb.Roster] = OrderedDict()

    def complete(self, notice: pb.Notice, timeout_s: float) -> pb.Notice:
        """Fill in the roster that a notice names by its digest; return the notice. Notices that
        name no roster are unchanged.

        Raises Unavailable if the coordinator no longer has the roster, InternalError for a roster
        of another digest, and what `fetch` raises.
        """
        shown: pb.Prepare | pb.GenerationRecord
        if notice.HasField("prepare"):
            shown = notice.prepare
        elif notice.outcome.verdict == pb.VERDICT_COMMITTED:
            shown = notice.outcome
        else:
            return notice
        if not shown.roster.entries:
            roster = self._kept.get(shown.digest) or self._fetched(shown.digest, timeout_s)
            shown.roster.CopyFrom(roster)
        self._kept[shown.digest] = shown.roster
        self._kept.move_to_end(shown.digest)
        while len(self._kept) > KEPT_ROSTERS:
            self._kept.popitem(last=False)
        return notice

    def _fetched(self, digest: str, timeout_s: float) -> pb.Roster:
        def fetch() -> bytes:
            try:
                return self._fetch(digest, timeout_s)
            except UnknownGeneration as error:
                raise Unavailable(
                    "the coordinator no longer has the roster of a notice",
                    seen=str(error),
                    fix="Attend again.",
                ) from error

        packed = self._shared.get(digest, fetch) if self._shared is not None else fetch()
        try:
            roster = unpack(pb.Roster, packed)
            seen = f"digest {roster_digest(roster)}"
        except MalformedMessage as error:
            seen = str(error)
        if seen != f"digest {digest}":
            raise InternalError(
                "the received roster has another digest than the requested one",
                seen=seen,
                expected=f"digest {digest}",
            )
        return roster
