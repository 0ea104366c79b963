"""The store that torchrun's agents use among themselves in one generation."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistError, DistNetworkError, DistStoreError

from shoal.membership.rendezvous_store import RendezvousStore, Value
from shoal_client.connection.coordinators import Coordinators
from shoal_proto.errors import (
    DeadlineExceeded,
    GenerationBroken,
    RejoinError,
    RetryError,
    Unavailable,
)
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub

# The keys under which torchrun's agents exchange the number of workers they run.
ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
TERMINAL_STATE = "torchelastic/agent/terminal_state"
"""Prefix of the keys of the agents' final barrier."""


class StoreTimeout(DeadlineExceeded, DistStoreError):
    """A key was not set in time; also of the type that torch's stores raise."""


class StoreUnreachable(Unavailable, DistNetworkError):
    """No coordinator answers; also of the type that a `TCPStore` raises."""


class StoreOver(GenerationBroken, DistNetworkError):
    """The generation, and so its store, is over."""


class AgentEnding(Protocol):
    """End of a node's work, as the agents' final barrier reports it."""

    def finish(self) -> None:
        """Report that this node's workers are done."""

    def await_others(self, timeout_s: float) -> None:
        """Wait until no other node needs this one."""


class AgentStore(RendezvousStore):
    """A generation's keys, for the agent of one node.

    After `next_rendezvous` the agents exchange their worker counts. An error in that exchange would
    end a torchrun agent. If a node is lost meanwhile, this node gets ranks as if all nodes ran as
    many workers as it does, and `made_up` is set: the agent then stops these workers.

    Errors are both torch's and Shoal's: DistStoreError for a wait that timed out, DistNetworkError
    for a store that is unreachable or over.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        token: Token,
        *,
        timeout_s: float,
        rank: int,
        world_size: int,
        ending: AgentEnding,
    ) -> None:
        super().__init__(coordinators, token, timeout_s=timeout_s)
        self._ending = ending
        self._rank = rank
        self._world_size = world_size
        self._own_info = b"{}"
        self.made_up = False
        self.give_up_s = math.inf
        """No call waits after this `time.monotonic()`."""

    def add(self, key: str, value: int) -> int:
        if not key.startswith(TERMINAL_STATE):
            return super().add(key, value)
        with _as_torch():
            self._ending.finish()
        return 0  # never the number of all nodes, as only the coordinator ends this barrier

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not all(key.startswith(TERMINAL_STATE) for key in keys):
            super().wait(keys, timeout)
            return
        with _as_torch():
            self._ending.await_others((timeout or self.timeout).total_seconds())

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
            return [self._assumed_value(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        try:
            super().multi_set(keys, values)
        except RejoinError:
            if not all(key.startswith(ASSIGNED_RANKS) for key in keys):
                raise
            self.made_up = True

    def _fetch(self, keys: Sequence[str], timeout_s: float) -> pb.StoreReply:
        with _as_torch():
            return super()._fetch(keys, self._within_s(timeout_s))

    def _call(
        self,
        method_of: Callable[[RendezvousStub], Any],
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> pb.StoreReply:
        within_s = self._within_s(timeout_s if timeout_s is not None else self._timeout_s)
        with _as_torch():
            return super()._call(method_of, request, timeout_s=within_s)

    def _within_s(self, timeout_s: float) -> float:
        return max(0.0, min(timeout_s, self.give_up_s - time.monotonic()))

    def _assumed_value(self, key: str) -> bytes:
        if key.startswith(ROLE_INFO):
            return self._own_info
        num_workers = int(json.loads(self._own_info).get("local_world_size", 1))
        base, total = self._rank * num_workers, self._world_size * num_workers
        return json.dumps([base, total, base, total]).encode()


@contextmanager
def _as_torch() -> Iterator[None]:
    """Raise errors of the store as torch's types too."""
    try:
        yield
    except (RetryError, RejoinError) as error:
        if isinstance(error, DistError):
            raise
        kind: type[StoreTimeout | StoreUnreachable | StoreOver] = StoreUnreachable
        if isinstance(error, DeadlineExceeded):
            kind = StoreTimeout
        elif isinstance(error, RejoinError):
            kind = StoreOver
        parts = {"seen": error.seen, "expected": error.expected, "fix": error.fix}
        raise kind(error.what, **parts, details=error.details) from error
