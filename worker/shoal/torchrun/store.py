"""The store that torchrun's agents use among themselves in one generation."""

import json
from collections.abc import Sequence

from shoal.membership.rendezvous_store import RendezvousStore, Value
from shoal_client.connection.coordinators import Coordinators
from shoal_proto.errors import RejoinError
from shoal_proto.v1.identity_pb2 import Token

# The keys by which torchrun's agents tell each other how many workers they run.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"


class AgentStore(RendezvousStore):
    """A generation's keys, for the agent of one node.

    After `next_rendezvous` the agents tell each other their worker counts. torchrun takes an error
    in that for the end of the agent, so a node lost in those milliseconds would take all others
    along. Instead this node is told ranks as if all nodes ran as many workers as it does, and
    `made_up` is set: the agent stops these workers again as soon as it looks for changes.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        token: Token,
        *,
        timeout_s: float,
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__(coordinators, token, timeout_s=timeout_s)
        self._rank = rank
        self._world_size = world_size
        self._own_info = b"{}"
        self.made_up = False

    def set(self, key: str, value: Value) -> None:
        if not key.startswith(ROLE_INFO):
            super().set(key, value)
            return
        self._own_info = value.encode() if isinstance(value, str) else bytes(value)
        try:
            super().set(key, value)
        except RejoinError:
            self.made_up = True

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        try:
            return super().multi_get(keys)
        except RejoinError:
            if not all(key.startswith((ROLE_INFO, ASSIGNED_RANKS)) for key in keys):
                raise
            self.made_up = True
            return [self._make_up(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        try:
            super().multi_set(keys, values)
        except RejoinError:
            if not all(key.startswith(ASSIGNED_RANKS) for key in keys):
                raise
            self.made_up = True

    def _make_up(self, key: str) -> bytes:
        if key.startswith(ROLE_INFO):
            return self._own_info
        num_workers = int(json.loads(self._own_info).get("local_world_size", 1))
        base, total = self._rank * num_workers, self._world_size * num_workers
        return json.dumps([base, total, base, total]).encode()
