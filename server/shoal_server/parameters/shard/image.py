"""What one shard is made of, apart from the process that holds it.

A shard goes from server to server as an `Image` and what was applied to it since as
`UpdateRecord`s, in order; snapshots and the journal keep the same two. Whoever replays the same
records on the same image has the same shard, to the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import PushRecord, SessionImage
from shoal_server.parameters.shard.sessions import SessionTable


@dataclass(frozen=True, kw_only=True)
class Image:
    """A whole shard as of one version. The tensors are its own: nobody writes to them."""

    kind: str
    """"dense" or "table"."""
    shard_id: int
    version: int
    spec: bytes
    """What the shard was made from: a serialized message that its kind knows."""
    tensors: Mapping[str, Tensor]
    """Values and optimizer state by name, on the CPU, contiguous."""
    sessions: Sequence[SessionImage]
    """What it remembers of pushes."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One push as it was applied."""

    push: PushRecord
    data: Buffer
    """The gradient, little-endian, as it came."""


class UpdateListener(Protocol):
    """Told of every push that a shard applies, within the shard's lock, so in order."""

    def __call__(self, record: UpdateRecord) -> None: ...


class ShardState(Protocol):
    """What every kind of shard can do, so that copies, moves and snapshots need not know it."""

    @property
    def shard_id(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        ...

    @property
    def sessions(self) -> SessionTable:
        """What it remembers of pushes. Without the shard's lock, ask only what needs none."""
        ...

    def regrown_bytes(self, num_rows: int) -> int:
        """What a push of so many rows copies, at most, to make room for them. Takes no lock."""
        ...

    def image(self, keeper: UpdateListener | None = None) -> Image:
        """A copy of all of it as of one version; `keeper`, if given, is told of every push after
        exactly that version, in place of the keeper before it."""
        ...

    def keep(self, keeper: UpdateListener | None) -> None:
        """From now on `keeper` is told of every push, in place of the keeper before it."""
        ...

    def enter_epoch(self, epoch: int) -> None:
        """Pushes of any other epoch are refused from now on, with WrongEpoch."""
        ...

    def replay(self, record: UpdateRecord) -> None:
        """Apply what the primary applied. Raises InternalError if it is not the next version."""
        ...
