"""Key-value stores through which the members of a generation connect."""

from typing import Protocol

from shoal.torch_private.c10d import HashStore, Store
from shoal_proto.v1.identity_pb2 import Token


class GenerationStores(Protocol):
    """Factory of one member's stores, one for each generation."""

    is_shared: bool
    """True if other members read and write the same keys."""

    def open(self, token: Token, timeout_s: float, *, once_a_host: bool = False) -> Store:
        """Open the store of the token's generation, which raises DeadlineExceeded for a key that is
        not set within the timeout. `once_a_host`: one rank reads many keys for its whole host."""

    def close(self) -> None:
        """Close the connection, if there is one. May be called twice."""


class LoneStore(HashStore):
    """Store of a generation of one member, which sets all keys itself."""

    def abort(self, reason: str) -> None:
        """Do nothing: no call of this store waits."""


class LoneStores:
    """`GenerationStores` of a member that trains alone."""

    is_shared = False

    def open(self, token: Token, timeout_s: float, *, once_a_host: bool = False) -> Store:
        return LoneStore()

    def close(self) -> None:
        """Do nothing: there is no connection."""
