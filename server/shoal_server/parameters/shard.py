"""One shard: its values, its optimizer state, its version and its memory of pushes, as one unit.

Every method is atomic: it holds the shard's lock from beginning to end, so pushes are serialised
and a reader never sees half of one. Nothing here waits for a network or an event loop.
"""

import math
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_proto.errors import MalformedMessage, NonFiniteGradient, ShapeMismatch, WrongEpoch
from shoal_proto.v1.parameters_pb2 import OptimizerSpec, ShardState
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.optimizers import new_optimizer
from shoal_server.parameters.sessions import Outcome, SessionTable

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# A gradient is only ever read: torch need not warn that its bytes cannot be written.
warnings.filterwarnings("ignore", message="The given buffer is not writable", module=__name__)

SEND_PIECE_BYTES = 1024 * 1024
STALENESS_BUCKETS = 64


@dataclass(frozen=True, kw_only=True)
class Push:
    """One gradient for one shard. `gradient` holds the present blocks, one after the other."""

    session: str
    sequence: int
    epoch: int
    base_version: int
    lr: float | None
    blocks: Sequence[int]
    gradient: bytes


class Slice(NamedTuple):
    """Consecutive bytes of a shard, to become a Piece."""

    offset_bytes: int
    data: bytes
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Values:
    """A shard's values as of one version, cut into pieces that own their bytes."""

    version: int
    num_bytes: int
    pieces: Sequence[Slice]


class LiveShard:
    def __init__(self, spec: Shard, optimizer: OptimizerSpec, values: bytearray) -> None:
        """Takes `values` over: they become the shard's storage."""
        self.spec = spec
        self.optimizer_spec = optimizer
        self.num_bytes = len(values)
        self._bytes = memoryview(values)
        self._dtype = DTYPES[spec.dtype]
        flat = torch.frombuffer(values, dtype=self._dtype)
        self._sizes = [block.num_elements for block in spec.blocks]
        self._optimizer = new_optimizer(optimizer, spec.group, torch.split(flat, self._sizes))
        self._sessions = SessionTable()
        self._version = 1
        self._pushes = self._duplicates = self._refused = 0
        self._staleness_counts = [0] * STALENESS_BUCKETS
        self._lock = threading.Lock()

    def wrong_epoch(self, epoch: int) -> WrongEpoch:
        """The error for a sender whose view of this shard is not the current one."""
        return WrongEpoch(
            f"shard {self.spec.shard_id} has another epoch",
            seen=str(epoch),
            expected=str(self.spec.epoch),
            fix="Fetch the shard map and retry.",
        )

    def push(
        self, push: Push, is_live: Callable[[str], bool], *, return_values: bool
    ) -> tuple[Outcome, bool, Values | None]:
        """Apply a gradient once; gives the outcome, whether it is a repeat, and the values.

        A repeated (session, sequence) gets its first outcome and changes nothing; the values then
        are those of now. Raises WrongEpoch, ForgottenPush, NonFiniteGradient, ShapeMismatch,
        MalformedMessage or Overloaded, and then nothing has changed either.
        """
        with self._lock:
            try:
                outcome, duplicate = self._push(push, is_live)
            except Exception:
                self._refused += 1
                raise
            return outcome, duplicate, self._read() if return_values else None

    def _push(self, push: Push, is_live: Callable[[str], bool]) -> tuple[Outcome, bool]:
        if push.epoch != self.spec.epoch:
            raise self.wrong_epoch(push.epoch)
        first = self._sessions.recall(push.session, push.sequence)
        if first is not None:
            self._duplicates += 1
            return first, True
        if push.base_version > self._version:
            raise MalformedMessage(
                f"the gradient for shard {self.spec.shard_id} has a base that does not exist",
                seen=f"base version {push.base_version}",
                expected=f"at most {self._version}",
                fix="Pull the shard again; it may have been made anew.",
            )
        gradients = self._split(push)
        lr = self.optimizer_spec.groups[self.spec.group].lr if push.lr is None else push.lr
        self._sessions.make_room(push.session, is_live)
        if push.blocks:
            self._optimizer.step(push.blocks, gradients, lr)
        outcome = Outcome(self._version + 1, self._version - push.base_version)
        self._version = outcome.version
        self._sessions.remember(push.session, push.sequence, outcome)
        self._pushes += 1
        self._staleness_counts[min(outcome.staleness, STALENESS_BUCKETS - 1)] += 1
        return outcome, False

    def _split(self, push: Push) -> Sequence[Tensor]:
        """The gradient as one finite tensor a block."""
        sizes = [self._sizes[b] for b in push.blocks]
        expected_bytes = sum(sizes) * self._dtype.itemsize
        if len(push.gradient) != expected_bytes:
            raise ShapeMismatch(
                f"the gradient for shard {self.spec.shard_id} has another length",
                seen=f"{len(push.gradient)} bytes",
                expected=f"{expected_bytes} bytes of {self.spec.dtype}",
            )
        if not sizes:
            return ()
        flat = torch.frombuffer(push.gradient, dtype=self._dtype)
        gradients = torch.split(flat, sizes)
        # A sum is finite only if all are, and far cheaper than asking each one; a sum that is not
        # may also be an overflow of finite numbers.
        total = flat.sum(dtype=max(self._dtype, torch.float32, key=lambda d: d.itemsize))
        if not math.isfinite(total.item()):
            self._refuse_non_finite(push.blocks, gradients)
        return gradients

    def _refuse_non_finite(self, blocks: Sequence[int], gradients: Sequence[Tensor]) -> None:
        for b, gradient in zip(blocks, gradients, strict=True):
            finite = torch.isfinite(gradient)
            if not finite.all():
                block = self.spec.blocks[b]
                at = int((~finite).nonzero()[0])
                raise NonFiniteGradient(
                    f"the gradient of parameter {block.parameter} is not finite",
                    seen=f"{gradient[at].item()} at element {block.offset + at}",
                    expected="finite numbers",
                    fix="Look for a division by zero, or lower the learning rate.",
                    details={"parameter": block.parameter},
                )

    def read(self, known_version: int = 0) -> Values:
        """The values now; without pieces if the version is still `known_version`."""
        with self._lock:
            if known_version == self._version:
                return Values(version=self._version, num_bytes=0, pieces=())
            return self._read()

    def _read(self) -> Values:
        pieces = []
        for start in range(0, self.num_bytes, SEND_PIECE_BYTES):
            data = bytes(self._bytes[start : start + SEND_PIECE_BYTES])
            pieces.append(Slice(start, data, zlib.crc32(data)))
        return Values(version=self._version, num_bytes=self.num_bytes, pieces=pieces)

    def describe(self, job: str) -> ShardState:
        """Counters and sizes, for people; without the lock, so that nobody waits for it."""
        return ShardState(
            job=job,
            shard_id=self.spec.shard_id,
            epoch=self.spec.epoch,
            version=self._version,
            num_bytes=self.num_bytes,
            pushes=self._pushes,
            duplicates=self._duplicates,
            refused=self._refused,
            staleness_counts=self._staleness_counts,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        return self.num_bytes + sum(t.nbytes for t in self._optimizer.state().values())
