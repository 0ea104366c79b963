"""Which other coordinator leads, as far as this one knows: for callers that ask the wrong one."""

from shoal_proto.errors import NotLeader


class KnownLeader:
    """Never this coordinator itself."""

    def __init__(self) -> None:
        self.address = ""
        """host:port; empty while no other coordinator is known to lead."""
        self.why_nobody = "nobody leads yet: etcd has not answered"
        """Where none is known: why."""
        self.num_changes = 0
        """How often another coordinator was seen to lead than the one before, this one included."""
        self._newest = ""

    def note(self, address: str) -> None:
        """That one leads, whichever it is; empty: nobody does."""
        if address and self._newest and address != self._newest:
            self.num_changes += 1
        self._newest = address or self._newest

    def __str__(self) -> str:
        return f"the coordinator at {self.address} leads" if self.address else self.why_nobody

    def not_leader(self) -> NotLeader:
        """What a caller is told."""
        return NotLeader(
            "this coordinator does not lead",
            seen=str(self),
            expected=f"a call to {self.address}" if self.address else "a leader to be elected",
            details={"leader": self.address},
        )
