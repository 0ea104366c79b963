"""The roster that a member was shown, kept for the record that will come without it."""

from shoal_proto.digest import roster_digest
from shoal_proto.errors import Unavailable
from shoal_proto.v1 import membership_pb2 as pb


class ShownRoster:
    """The roster of the newest Prepare."""

    def __init__(self) -> None:
        self._roster = pb.Roster()
        self._digest = ""

    def keep(self, prepare: pb.Prepare) -> str:
        """Keep the roster; return its digest, computed here."""
        self._roster, self._digest = prepare.roster, roster_digest(prepare.roster)
        return self._digest

    def completed(self, record: pb.GenerationRecord) -> pb.GenerationRecord:
        """The record with its roster, put in from the Prepare of the same digest if it has none.

        Raises Unavailable where that was another: on a new stream the record comes whole.
        """
        if record.roster.entries:
            return record
        if record.digest != self._digest:
            raise Unavailable(
                f"the roster of generation {record.roster.generation} was left out, but this"
                " member was not shown it",
                seen=f"digest {record.digest}",
                expected=f"digest {self._digest or '(no roster shown yet)'}",
                fix="Attend again: a new stream gets the whole record.",
            )
        whole = pb.GenerationRecord()
        whole.CopyFrom(record)
        whole.roster.CopyFrom(self._roster)
        return whole
