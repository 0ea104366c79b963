"""One shard: its values, its optimizer state, its version and its memory of pushes, as one unit.

Every method is atomic: it holds the shard's lock from beginning to end, so pushes are serialised
and a reader never sees half of one. Nothing here waits for a network or an event loop.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from shoal_proto.errors import InternalError, MalformedMessage, WrongEpoch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.parameters_pb2 import ShardState
from shoal_proto.v1.replication_pb2 import DenseSpec, PushRecord
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.shard.gradients import DTYPES, BlockSplitter
from shoal_server.parameters.shard.image import Image, UpdateListener, UpdateRecord
from shoal_server.parameters.shard.reply_writer import SHARD_DATA, CopyOut
from shoal_server.parameters.shard.sessions import RememberedOutcome, SessionTable
from shoal_server.parameters.shard.step_scope import Scope, to_message
from shoal_server.parameters.shard.update_rule import UpdateRule

STALENESS_BUCKETS = 64

KIND = "dense"
VALUES = "values"


@dataclass(frozen=True, kw_only=True)
class Push:
    """One gradient for one shard.

    `gradient` holds the present blocks, one after the other; where the shard `needs_base`, the
    values that it was computed on follow in the same order.
    """

    session: str
    sequence: int
    epoch: int
    base_version: int
    lr: float | None
    blocks: Sequence[int]
    gradient: Buffer
    base_epoch: int = 0
    """The shard's epoch when the base version was received; 0: not told."""
    is_borrowed: bool = False
    """The gradient's memory is its sender's again once the push is answered."""
    scope: Scope | None = None
    """What the push is part of; None: of a push to every dense shard."""


@dataclass(frozen=True, kw_only=True)
class Values:
    """A shard's values as of one version."""

    version: int
    num_bytes: int
    messages: Sequence[bytes]
    """What its writer made of them."""


class DenseShard:
    def __init__(self, spec: Shard, optimizer: OptimizerSpec, values: bytearray) -> None:
        """Takes `values` over: they become the shard's storage."""
        self.spec = spec
        self.optimizer_spec = optimizer
        self.num_bytes = len(values)
        self._bytes = memoryview(values)
        self._values = torch.frombuffer(values, dtype=DTYPES[spec.dtype])
        blocks = torch.split(self._values, [block.num_elements for block in spec.blocks])
        self._rule = UpdateRule(optimizer, spec.group, blocks, BlockSplitter(spec))
        self._sessions = SessionTable()
        self._version = 1
        self._pushes = self._duplicates = self._refused = 0
        self._staleness_counts = [0] * STALENESS_BUCKETS
        self._keeper: UpdateListener | None = None
        self._lock = threading.Lock()

    @property
    def shard_id(self) -> int:
        return self.spec.shard_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def sessions(self) -> SessionTable:
        return self._sessions

    @property
    def needs_base(self) -> bool:
        """Whether the values that a gradient was computed on have to follow it in a push."""
        return self._rule.needs_base

    def wrong_epoch(self, epoch: int) -> WrongEpoch:
        """The error for a sender whose view of this shard is not the current one."""
        return WrongEpoch(
            f"shard {self.spec.shard_id} has another epoch",
            seen=str(epoch),
            expected=str(self.spec.epoch),
            fix="Fetch the shard map and retry.",
        )

    def push(
        self, push: Push, is_live: Callable[[str], bool], *, writer: CopyOut | None = None
    ) -> tuple[RememberedOutcome, bool, Values | None]:
        """Apply a gradient once; gives the outcome, whether it is a repeat, and, with a writer, the
        values.

        A repeated (session, sequence) gets its first outcome and changes nothing; the values then
        are those of now. Raises WrongEpoch, ForgottenPush, StalePush, NonFiniteGradient,
        ShapeMismatch, MalformedMessage or Overloaded, and then nothing has changed either.
        """
        with self._lock:
            try:
                outcome, duplicate = self._push(push, is_live)
            except Exception:
                self._refused += 1
                raise
            return outcome, duplicate, None if writer is None else self._read(writer)

    def _push(self, push: Push, is_live: Callable[[str], bool]) -> tuple[RememberedOutcome, bool]:
        if push.epoch != self.spec.epoch:
            raise self.wrong_epoch(push.epoch)
        first = self._sessions.recall(push.session, push.sequence)
        if first is not None:
            self._duplicates += 1
            return first, True
        staleness = self._staleness(push)
        self._rule.check(push.blocks, push.gradient, staleness, self.spec.shard_id)
        record = PushRecord(
            session=push.session,
            sequence=push.sequence,
            version=self._version + 1,
            staleness=staleness,
            blocks=push.blocks,
            lr=self._rule.lr(push.lr, staleness),
            at_unix_s=time.time(),
            forgotten_sessions=self._sessions.make_room(push.session, is_live),
            step=to_message(push.scope),
        )
        # A keeper needs the gradient for longer than the push takes.
        is_copied = push.is_borrowed and self._keeper is not None
        gradient = bytes(push.gradient) if is_copied else push.gradient
        return self._apply(UpdateRecord(record, gradient)), False

    def _staleness(self, push: Push) -> int:
        """How many updates the gradient does not know of."""
        if push.base_version <= self._version:
            return self._version - push.base_version
        if 0 < push.base_epoch < push.epoch:
            # That version died with a primary before anybody else had it.
            return 0
        raise MalformedMessage(
            f"the gradient for shard {self.spec.shard_id} has a base that does not exist",
            seen=f"base version {push.base_version}",
            expected=f"at most {self._version}",
            fix="Pull the shard again; it may have been made anew.",
        )

    def _apply(self, record: UpdateRecord) -> RememberedOutcome:
        """All that a push changes, on the primary and on every copy alike: nothing in here may
        depend on anything but the shard and the record."""
        push = record.push
        self._rule.apply(push, record.data)
        self._sessions.forget(push.forgotten_sessions)
        outcome = RememberedOutcome(push.version, push.staleness)
        self._version = outcome.version
        scope = Scope.from_message(push.step)
        self._sessions.remember(push.session, push.sequence, outcome, scope)
        self._pushes += 1
        self._staleness_counts[min(outcome.staleness, STALENESS_BUCKETS - 1)] += 1
        if self._keeper is not None:
            self._keeper(record)
        return outcome

    def replay(self, record: UpdateRecord) -> None:
        """Apply what the primary applied; the keeper, if there is one, is told of it too.

        Raises InternalError if it is not the next version, or ShapeMismatch if its data have
        another length; then nothing has changed.
        """
        with self._lock:
            if record.push.version != self._version + 1:
                raise InternalError(
                    f"shard {self.spec.shard_id} was told of an update out of order",
                    seen=f"version {record.push.version}",
                    expected=f"version {self._version + 1}",
                )
            self._apply(record)

    def read(self, known_version: int = 0, writer: CopyOut | None = None) -> Values:
        """The values now, as ShardData if no writer is given; none if the version is still
        `known_version`."""
        with self._lock:
            if known_version == self._version:
                return Values(version=self._version, num_bytes=0, messages=())
            return self._read(writer or SHARD_DATA.writer(self.shard_id, self.num_bytes))

    def _read(self, writer: CopyOut) -> Values:
        messages = writer(self.spec.shard_id, self._bytes)
        return Values(version=self._version, num_bytes=self.num_bytes, messages=messages)

    def keep(self, keeper: UpdateListener | None) -> None:
        """From now on `keeper` is told of every push, in place of the keeper before it."""
        with self._lock:
            self._keeper = keeper

    def enter_epoch(self, epoch: int) -> None:
        """Pushes of any other epoch are refused from now on, with WrongEpoch."""
        with self._lock:
            self.spec.epoch = epoch

    def regrown_bytes(self, num_rows: int) -> int:
        """Nothing: a dense shard has its size from the beginning."""
        return 0

    def image(self, keeper: UpdateListener | None = None) -> Image:
        """A copy of all of it as of one version; `keeper`, if given, is told of every push after
        exactly that version, in place of the keeper before it."""
        with self._lock:
            if keeper is not None:
                self._keeper = keeper
            spec = DenseSpec(shard=self.spec, optimizer=self.optimizer_spec)
            return Image(
                kind=KIND,
                shard_id=self.spec.shard_id,
                version=self._version,
                spec=spec.SerializeToString(deterministic=True),
                tensors={name: tensor.clone() for name, tensor in self._tensors().items()},
                sessions=self._sessions.export(),
            )

    @classmethod
    def from_image(cls, image: Image) -> "DenseShard":
        """The same shard once more, to the last bit; its counters start from 0.

        Raises InternalError if the image is not whole or not of a dense shard.
        """
        spec = _dense_spec(image)
        num_elements = sum(block.num_elements for block in spec.shard.blocks)
        values = image.tensors.get(VALUES)
        if image.kind != KIND or values is None or values.numel() != num_elements:
            raise InternalError(
                f"the image of shard {image.shard_id} is not that of a dense shard",
                seen=f"{image.kind!r}, {0 if values is None else values.numel()} values",
                expected=f"{KIND!r}, {num_elements} values",
            )
        shard = cls(spec.shard, spec.optimizer, bytearray(values.view(torch.uint8).numpy().data))
        shard._rule.load_state({n: t for n, t in image.tensors.items() if n != VALUES})
        shard._sessions.restore(image.sessions)
        shard._version = image.version
        return shard

    def _tensors(self) -> Mapping[str, Tensor]:
        return {VALUES: self._values, **self._rule.state()}

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

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state, which all are there from the beginning."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @staticmethod
    def bytes_to_make(spec: Shard, optimizer: OptimizerSpec) -> int:
        """The `memory_bytes` that a new shard will have, from two small ones with as many blocks:
        it grows by the same for each element."""

        def bytes_of(block_size: int) -> int:
            values = torch.zeros(len(spec.blocks) * block_size, dtype=DTYPES[spec.dtype])
            blocks = torch.split(values, [block_size] * len(spec.blocks))
            rule = UpdateRule(optimizer, spec.group, blocks, BlockSplitter(spec))
            return values.nbytes + sum(tensor.nbytes for tensor in rule.state().values())

        if not spec.blocks:
            return 0
        num_elements, num_blocks = sum(b.num_elements for b in spec.blocks), len(spec.blocks)
        least = bytes_of(1)
        return least + (bytes_of(2) - least) * (num_elements - num_blocks) // num_blocks


def _dense_spec(image: Image) -> DenseSpec:
    try:
        return DenseSpec.FromString(image.spec)
    except DecodeError as error:
        raise InternalError(
            f"the image of shard {image.shard_id} does not say what it was made from",
            seen=repr(error),
            expected="a DenseSpec",
        ) from error
