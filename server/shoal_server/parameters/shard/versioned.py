"""A shard of any kind: versions and remembered pushes around a body of values."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import Fenced, InternalError, MalformedMessage, StalePush, WrongEpoch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.parameters_pb2 import ShardState
from shoal_proto.v1.replication_pb2 import CutHeader, PushRecord, SessionImage
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.images.shard_image import ImageContent, OpenImages, ShardImage, rest_of
from shoal_server.parameters.shard.record import Keep, UpdateListener, UpdateRecord
from shoal_server.parameters.shard.sessions import RememberedOutcome, SessionTable, exported
from shoal_server.parameters.shard.step_scope import Scope, to_message

STALENESS_BUCKETS = 64

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Gradients for one shard; subclasses name the blocks or rows."""

    session: str
    sequence: int
    epoch: int
    base_version: int
    lr: float | None
    gradient: Buffer
    base_epoch: int = 0
    """Epoch of the shard at the base version; 0 if unknown."""
    is_borrowed: bool = False
    """True if the gradient lies in memory that its sender may change at any time."""
    scope: Scope | None = None
    """Shards of the step; None for all dense shards, or only this shard of a table."""
    batch: object = None
    """Data as the body's `read_batch` returns them. None if not decoded yet; always None for
    borrowed data."""
    at_unix_s: float = field(default_factory=time.time)
    """Time by this server's clock or, for rows, by `TableBody.now_s`."""


@dataclass(frozen=True, kw_only=True)
class ShardPushResult(Generic[T]):
    version: int
    staleness: int
    fates: bytes
    """RowFate of each row, in the push's order; empty if all rows were applied."""
    is_duplicate: bool = False
    values: T | None = None
    """Result of `read`; None without one."""


PushT_contra = TypeVar("PushT_contra", bound=Push, contravariant=True)
BatchT = TypeVar("BatchT")


SmallTensors = Callable[[Sequence[SessionImage]], Mapping[str, Tensor]]
"""Returns the small tensors of a body's image, in any thread."""


class ShardBody(Protocol[PushT_contra, BatchT]):
    """The values of a shard, used by one thread at a time. `apply` must depend only on the body and
    the record: every replica does the same."""

    kind: str

    @property
    def num_bytes(self) -> int:
        """Bytes of values; of a table, with optimizer state and index. Needs no lock."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state; needs no lock."""
        ...

    def regrown_bytes(self, num_rows: int) -> int:
        """Return the most bytes that a push processes besides its rows. Needs no lock."""
        ...

    def describe_push(self, push: PushT_contra, record: PushRecord) -> None:
        """Add the fields that `apply` needs to the record. Raises an error to refuse the push."""
        ...

    def read_batch(self, record: PushRecord, data: Buffer) -> BatchT:
        """Decode the data of a push. Raises ShapeMismatch, MalformedMessage, InvalidSpec or
        NonFiniteGradient."""
        ...

    def growth_bytes(self, batch: BatchT, at_unix_s: float) -> int:
        """Return the most bytes by which a push may grow the body."""
        ...

    def apply(self, record: PushRecord, batch: BatchT) -> bytes:
        """Change the values; return each row's fate, or nothing if all were applied. An error means
        no change."""
        ...

    def fates(self, session: str, sequence: int) -> bytes:
        """Return the fates of the rows of a remembered push; empty if all were applied."""
        ...

    def ended_sessions(self, is_live: Callable[[str], bool]) -> Sequence[str]:
        """Return the sessions with fates that are not live: no retry will need their fates."""
        ...

    def spec_message(self, spec: Shard) -> Message:
        """Return the message that describes an empty shard of the same kind."""
        ...

    @property
    def images(self) -> OpenImages[Any]:
        """Open images. `apply` saves values to each of them before it changes the values."""
        ...

    def image(self) -> tuple[ImageContent, SmallTensors]:
        """Return an image of the large tensors, added to `images`; and a function that returns the
        small ones later."""
        ...

    def flat_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors whose elements have the same order in every replica: contiguous, not
        copied."""
        ...

    def row_ids(self, start: int, num_bytes: int) -> tuple[bytes, int]:
        """Return the ids of about `num_bytes` of rows from position `start` on; and the position to
        continue from, which is `start` at the end."""
        ...

    def rows_of(self, row_ids: bytes) -> tuple[NDArray[np.int64], Sequence[Tensor]]:
        """Return an array, and copies of the tensors of the existing rows. The array has the body's
        number of rows, then the birth of each row in `row_ids`, 0 for a missing row."""
        ...


BodyT = TypeVar("BodyT", bound=ShardBody[Any, Any])


def _nothing() -> None:
    """Do nothing after a push is applied."""


def _unlimited(num_bytes: int) -> None:
    """Allow any growth."""


class VersionedShard(Generic[BodyT]):
    def __init__(self, spec: Shard, body: BodyT) -> None:
        """Make a new shard at version 1."""
        self.spec = spec
        self.body = body
        self._sessions = SessionTable()
        self._version = self._epoch_version = 1
        self._epoch = spec.epoch
        """The epoch that began at `_epoch_version`."""
        self._pushes = self._duplicates = self._refused = 0
        self._staleness_counts = [0] * STALENESS_BUCKETS
        self._listener: UpdateListener | None = None
        self._keep: Keep = bytes
        self._body_lock = threading.RLock()
        """Protects the body; taken before `_lock`. Held for at most one push, one `read`, the start
        or one chunk of an image, or from `try_enter` to `leave`."""
        self._lock = threading.Lock()
        """Protects all other state."""

    @classmethod
    def restored(
        cls, spec: Shard, body: BodyT, version: int, sessions: Sequence[SessionImage]
    ) -> "VersionedShard[BodyT]":
        """Make a shard from an image. Raises InternalError if the sessions are inconsistent."""
        shard = cls(spec, body)
        shard._sessions.restore(sessions)
        shard._version = shard._epoch_version = version
        return shard

    @property
    def shard_id(self) -> int:
        return self.spec.shard_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def sessions(self) -> SessionTable:
        """Remembered pushes. Without the shard's lock, use only methods that need none."""
        return self._sessions

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        return self.body.memory_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the body, of remembered pushes, and of old values kept for images."""
        return self.memory_bytes + self._sessions.num_bytes + self.body.images.held_bytes

    def wrong_epoch(self, epoch: int) -> WrongEpoch:
        """Return the error for a push with another epoch."""
        return WrongEpoch(
            f"shard {self.spec.shard_id} has another epoch",
            seen=str(epoch),
            expected=str(self.spec.epoch),
            fix="Fetch the shard map and retry.",
        )

    def push(
        self,
        push: Push,
        is_live: Callable[[str], bool],
        take_memory: Callable[[int], None] = _unlimited,
        *,
        on_applied: Callable[[], None] = _nothing,
        read: Callable[[int], T] | None = None,
    ) -> ShardPushResult[T]:
        """Apply gradients once; then call the listener, `on_applied`, and `read` with the version.

        For a repeated (session, sequence), only `on_applied` and `read` are called, and the first
        outcome is returned. `take_memory` gets the most bytes by which the shard may grow; it
        raises Overloaded to refuse the push. Raises, without a change of the values, WrongEpoch,
        Fenced unless `is_live` of the push's session, ForgottenPush, StalePush, NonFiniteGradient,
        ShapeMismatch, MalformedMessage, InvalidSpec or Overloaded.
        """
        with self._body_lock:
            with self._lock:
                try:
                    outcome, fates, is_duplicate = self._push(push, is_live, take_memory)
                except WrongEpoch:
                    # The service counts these: it also refuses pushes before they reach a shard.
                    raise
                except Exception:
                    self._refused += 1
                    raise
            on_applied()
            return ShardPushResult(
                version=outcome.version,
                staleness=outcome.staleness,
                fates=fates,
                is_duplicate=is_duplicate,
                values=None if read is None else read(self._version),
            )

    def _push(
        self, push: Push, is_live: Callable[[str], bool], take_memory: Callable[[int], None]
    ) -> tuple[RememberedOutcome, bytes, bool]:
        if push.epoch != self.spec.epoch:
            raise self.wrong_epoch(push.epoch)
        # The member was live when its call began, which may be minutes ago.
        if not is_live(push.session):
            raise self._fenced(push)
        first = self._sessions.recall(push.session, push.sequence)
        if first is not None:
            self._duplicates += 1
            return first, self.body.fates(push.session, push.sequence), True
        if 0 < push.base_epoch < self.spec.first_epoch:
            # The shard was lost and started over: the push may have been acknowledged before.
            raise self._lost_base(push)
        record = PushRecord(
            session=push.session,
            sequence=push.sequence,
            version=self._version + 1,
            staleness=self._staleness(push),
            at_unix_s=push.at_unix_s,
            step=to_message(push.scope),
        )
        self.body.describe_push(push, record)
        # Copied before decoding: the listener must get the bytes that are applied.
        is_kept = push.is_borrowed and self._listener is not None
        data = self._keep(push.gradient) if is_kept else push.gradient
        batch = self.body.read_batch(record, data) if push.batch is None else push.batch
        take_memory(self.body.growth_bytes(batch, push.at_unix_s))
        if push.session not in self._sessions:
            record.ended_sessions.extend(self.body.ended_sessions(is_live))
        record.forgotten_sessions.extend(self._sessions.evict_for(push.session, is_live))
        is_lent = push.is_borrowed and not isinstance(data, bytes)
        return *self._apply(UpdateRecord(record, data, is_lent), batch), False

    def _fenced(self, push: Push) -> Fenced:
        return Fenced(
            f"a member may not change shard {self.spec.shard_id} any more: it left, was lost or was"
            " replaced during its push",
            seen=f"push {push.sequence} of {push.session}",
            expected="a push of a member that is present",
            fix="Join again to continue.",
        )

    def _lost_base(self, push: Push) -> StalePush:
        return StalePush(
            f"the gradients for shard {self.spec.shard_id} were computed on values that were lost",
            seen=f"values of epoch {push.base_epoch}",
            expected=f"values of epoch {self.spec.first_epoch} or later, in which it started over",
            fix="Pull the shard, or look its rows up, and compute the gradients again.",
        )

    def _staleness(self, push: Push) -> int:
        base_version = push.base_version
        if 0 < push.base_epoch < push.epoch:
            # Later versions of an earlier epoch were lost with its primary, or undone by a restore:
            # every update of this epoch is one that the gradient does not take into account.
            base_version = min(base_version, self._epoch_version)
        if base_version <= self._version:
            return self._version - base_version
        raise MalformedMessage(
            f"the gradients for shard {self.spec.shard_id} have a base version that does not exist",
            seen=f"base version {push.base_version}",
            expected=f"at most {self._version}",
            fix="Pull the shard again, or look its rows up again: it may have been created anew.",
        )

    def _apply(self, record: UpdateRecord, batch: object) -> tuple[RememberedOutcome, bytes]:
        """Make all changes of a push. They depend only on the shard and the record, as every
        replica makes them."""
        push = record.push
        fates = self.body.apply(push, batch)
        self._sessions.forget(push.forgotten_sessions)
        outcome = RememberedOutcome(push.version, push.staleness)
        self._version = push.version
        scope = Scope.from_message(push.step)
        self._sessions.remember(push.session, push.sequence, outcome, scope)
        self._pushes += 1
        self._staleness_counts[min(push.staleness, STALENESS_BUCKETS - 1)] += 1
        if self._listener is not None:
            self._listener(record)
        return outcome, fates

    def replay(self, record: UpdateRecord, *, is_borrowed: bool = False) -> None:
        """Apply an update of the primary, and call the listener. `is_borrowed`: the sender reuses
        the data's memory afterwards. Raises, without a change, InternalError if the record is not
        of the next version, or what the body raises."""
        with self._body_lock, self._lock:
            if record.push.version != self._version + 1:
                raise InternalError(
                    f"shard {self.spec.shard_id} received an update out of order",
                    seen=f"version {record.push.version}",
                    expected=f"version {self._version + 1}",
                )
            if is_borrowed and self._listener is not None:
                data = self._keep(record.data)
                record = UpdateRecord(record.push, data, is_lent=not isinstance(data, bytes))
            self._apply(record, self.body.read_batch(record.push, record.data))

    def try_enter(self) -> bool:
        """Take the body's lock without waiting. If True is returned, call `leave` after the
        work."""
        return self._body_lock.acquire(blocking=False)

    def leave(self) -> None:
        """Release the lock that `try_enter` took."""
        self._body_lock.release()

    def read(self, work: Callable[[int], T]) -> T:
        """Call `work` with the version while the body cannot change; return its result."""
        with self._body_lock:
            return work(self._version)

    def subscribe(self, listener: UpdateListener | None, keep: Keep = bytes) -> None:
        """Replace the listener for every push; None: no listener. Borrowed data are passed to
        `keep` first."""
        with self._lock:
            self._listener, self._keep = listener, keep

    def enter_epoch(self, epoch: int) -> None:
        """Set the shard's epoch: pushes of other epochs are refused."""
        with self._lock:
            if epoch != self._epoch:
                self._epoch, self._epoch_version = epoch, self._version
            self.spec.epoch = epoch

    def refuse_pushes(self) -> None:
        """Refuse pushes of the present epoch, until `enter_epoch` begins the next one or continues
        the present one."""
        with self._lock:
            self.spec.epoch = self._epoch + 1

    def image(self, *, epoch: int = 0) -> ShardImage:
        """Return an image of the shard, to be read in chunks while pushes continue, and closed
        after use. `epoch`: the primary's. Waits for a push in progress: call this in a thread if
        the shard is large."""
        with self._body_lock:
            with self._lock:
                shard = Shard()
                shard.CopyFrom(self.spec)
                shard.epoch = self._epoch  # also while pushes of it are refused
                spec = self.body.spec_message(shard).SerializeToString(deterministic=True)
            frozen, version = self._sessions.freeze(), self._version
            content, small = self.body.image()
        sessions = exported(frozen)
        header = CutHeader(
            shard_id=self.spec.shard_id, version=version, kind=self.body.kind, spec=spec
        )
        return ShardImage(
            header,
            content=content,
            rest=rest_of(sessions, small(sessions)),
            lock=self._body_lock,
            images=self.body.images,
            epoch=epoch,
        )

    def describe(self, job: str) -> ShardState:
        """Return counters and sizes for display. Takes no lock."""
        return ShardState(
            job=job,
            shard_id=self.spec.shard_id,
            epoch=self.spec.epoch,
            version=self._version,
            num_bytes=self.body.num_bytes,
            pushes=self._pushes,
            duplicates=self._duplicates,
            refused=self._refused,
            staleness_counts=self._staleness_counts,
        )


AnyShard = VersionedShard[Any]
