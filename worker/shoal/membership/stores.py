"""The key-value stores in which the members of a generation meet."""

from typing import Protocol

from shoal.torch_private.c10d import HashStore, Store
from shoal_proto.v1.identity_pb2 import Token


class GenerationStores(Protocol):
    """Opens the stores of one member, a new one for each generation."""

    is_shared: bool
    """True if other members reach the same keys."""

    def open(self, token: Token, timeout_s: float, *, once_a_host: bool = False) -> Store:
        """The keys of the token's generation. A key that is not set within the timeout raises
        DeadlineExceeded. `once_a_host`: many keys are read once for all ranks of a host."""

    def close(self) -> None:
        """Close the connection, if there is one. May be called twice."""


class LoneStore(HashStore):
    """The keys of a generation of one member: all are its own, so no call waits."""

    def abort(self, reason: str) -> None:
        """Do nothing: no call ever waits."""


class LoneStores:
    """`GenerationStores` of a member that trains alone."""

    is_shared = False

    def open(self, token: Token, timeout_s: float, *, once_a_host: bool = False) -> Store:
        return LoneStore()

    def close(self) -> None:
        """Do nothing: there is no connection."""
