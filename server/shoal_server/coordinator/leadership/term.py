"""The term of a coordinator that leads: what its writes must compare, and why it has to end."""

import asyncio
from collections.abc import Sequence

from shoal_proto.errors import NotLeader
from shoal_server.etcd.api import Compare


class Term:
    """Between `begin` and `end` this coordinator leads, as far as etcd agrees to each write."""

    def __init__(self) -> None:
        self.deposed = asyncio.Event()
        """Set when a write or a job showed that this coordinator must not lead any longer."""
        self.why_deposed = ""
        self._conditions: Sequence[Compare] | None = None

    def begin(self, conditions: Sequence[Compare]) -> None:
        """`conditions` must hold in etcd for each write."""
        self._conditions = conditions
        self.deposed.clear()

    def end(self) -> None:
        """Nothing is written any more."""
        self._conditions = None

    def depose(self, reason: str) -> None:
        """The term cannot go on."""
        self.why_deposed = reason
        self.deposed.set()

    def conditions(self) -> Sequence[Compare]:
        """What every write compares. Raises NotLeader outside of a term."""
        if self._conditions is None:
            raise NotLeader("this coordinator does not lead", details={"leader": ""})
        return self._conditions
