"""One shard, whatever it is made of: its versions and its memory of pushes around a body of values.

Every method is atomic: it holds one of the shard's locks from beginning to end, so pushes are
serialised and a reader never sees half of one. Nothing here waits for a network or an event loop.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError, MalformedMessage, StalePush, WrongEpoch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.parameters_pb2 import ShardState
from shoal_proto.v1.replication_pb2 import CutHeader, PushRecord, SessionImage
from shoal_proto.v1.shards_pb2 import Shard
from shoal_server.parameters.cuts.shard_cut import CutContent, OpenCuts, ShardCut, rest_of
from shoal_server.parameters.shard.image import Image, Keep, UpdateListener, UpdateRecord
from shoal_server.parameters.shard.sessions import RememberedOutcome, SessionTable, exported
from shoal_server.parameters.shard.step_scope import Scope, to_message

STALENESS_BUCKETS = 64

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Push:
    """Gradients for one shard; what they are gradients of, each kind of shard adds."""

    session: str
    sequence: int
    epoch: int
    base_version: int
    lr: float | None
    gradient: Buffer
    base_epoch: int = 0
    """The shard's epoch when the base version was received; 0: not told."""
    is_borrowed: bool = False
    """The gradient's memory is its sender's, which may change it at any time, and has it back once
    the push is answered."""
    scope: Scope | None = None
    """What the push is part of; None: of a push to every dense shard, or to this
    shard of a table alone."""
    batch: object = None
    """What the body's `read_batch` makes of the gradient, where that is known; it is the push's
    own memory."""
    at_unix_s: float = field(default_factory=time.time)
    """When it came in, by this server's clock."""


@dataclass(frozen=True, kw_only=True)
class PushResult(Generic[T]):
    version: int
    staleness: int
    fates: bytes
    """Of a table: a RowFate for each row as it came; empty: all were applied."""
    is_duplicate: bool = False
    values: T | None = None
    """What was read right after the push, if anything was to be."""


PushT_contra = TypeVar("PushT_contra", bound=Push, contravariant=True)
BatchT = TypeVar("BatchT")


SmallTensors = Callable[[Sequence[SessionImage]], Mapping[str, Tensor]]
"""What a body keeps beside its large tensors, to go with these sessions. Any thread."""


class ShardBody(Protocol[PushT_contra, BatchT]):
    """What a shard consists of, for one thread at a time. Nothing that `apply` does may depend on
    anything but the body and the record: every copy does the same."""

    kind: str

    @property
    def num_bytes(self) -> int:
        """Bytes of values; may be asked at any time."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state; may be asked at any time."""
        ...

    def regrown_bytes(self, num_rows: int) -> int:
        """What a push of so many rows goes through, at most, to make room; may be asked at any
        time."""
        ...

    def describe_push(self, push: PushT_contra, record: PushRecord) -> None:
        """Say in the record what the body needs. Raises for what must not be applied."""
        ...

    def read_batch(self, record: PushRecord, data: Buffer) -> BatchT:
        """Raises ShapeMismatch, MalformedMessage or NonFiniteGradient for data of another push."""
        ...

    def growth_bytes(self, batch: BatchT, at_unix_s: float) -> int:
        """By how much a push at that time may grow what is held."""
        ...

    def apply(self, record: PushRecord, batch: BatchT) -> bytes:
        """Change the values; what became of each row. Changes nothing if it raises."""
        ...

    def fates(self, session: str, sequence: int) -> bytes:
        """What became of the rows of a push that is remembered."""
        ...

    def spec_message(self, spec: Shard) -> Message:
        """What the shard is made from."""
        ...

    @property
    def cuts(self) -> OpenCuts[Any]:
        """Those that are open: `apply` leaves to each what it was."""
        ...

    def cut(self) -> tuple[CutContent, SmallTensors]:
        """All of it as of now, without a copy: what is large, which is among `cuts`, and what is
        small, which may be asked for later."""
        ...

    def flat_tensors(self) -> Mapping[str, Tensor]:
        """What lies in the same order in every copy: contiguous, and not copied."""
        ...

    def row_ids(self, start: int, num_bytes: int) -> tuple[bytes, int]:
        """The ids of rows of about so many bytes from a place on, and the place behind them; the
        same place where there are no more."""
        ...

    def rows_of(self, row_ids: bytes) -> tuple[NDArray[np.int64], Sequence[Tensor]]:
        """The births of these rows, 0 for those that are not here, and before them how many rows
        there are altogether; and a copy of all that those are made of which are here."""
        ...


BodyT = TypeVar("BodyT", bound=ShardBody[Any, Any])


def _nothing() -> None:
    """Where nothing is to be done once a push is applied."""


def _unlimited(num_bytes: int) -> None:
    """Where memory has no limit."""


class VersionedShard(Generic[BodyT]):
    def __init__(self, spec: Shard, body: BodyT) -> None:
        """New: at version 1, without memory of any push."""
        self.spec = spec
        self.body = body
        self._sessions = SessionTable()
        self._version = 1
        self._pushes = self._duplicates = self._refused = 0
        self._staleness_counts = [0] * STALENESS_BUCKETS
        self._listener: UpdateListener | None = None
        self._keep: Keep = bytes
        self._body_lock = threading.RLock()
        """For what reads or writes the body; taken before the other one. It is never held for
        longer than a push, or one chunk of a cut, takes."""
        self._lock = threading.Lock()
        """For all else; only a push holds it for longer than a moment."""

    @classmethod
    def restored(
        cls, spec: Shard, body: BodyT, version: int, sessions: Sequence[SessionImage]
    ) -> "VersionedShard[BodyT]":
        """The same shard once more, to the last bit; its counters start from 0.

        Raises InternalError if the sessions are torn.
        """
        shard = cls(spec, body)
        shard._sessions.restore(sessions)
        shard._version = version
        return shard

    @property
    def shard_id(self) -> int:
        return self.spec.shard_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def sessions(self) -> SessionTable:
        """What it remembers of pushes. Without the shard's lock, ask only what needs none."""
        return self._sessions

    @property
    def memory_bytes(self) -> int:
        """Bytes of values and optimizer state."""
        return self.body.memory_bytes

    @property
    def held_bytes(self) -> int:
        """All the memory that it takes, with what it remembers of pushes and keeps for cuts."""
        return self.memory_bytes + self._sessions.num_bytes + self.body.cuts.held_bytes

    def wrong_epoch(self, epoch: int) -> WrongEpoch:
        """The error for a sender whose view of this shard is not the current one."""
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
        told: Callable[[], None] = _nothing,
        read: Callable[[int], T] | None = None,
    ) -> PushResult[T]:
        """Apply gradients once; `told` is called once the listener was told of it; `read`, which is
        told the version, then reads the body.

        A repeated (session, sequence) gets its first outcome and changes nothing; what is read then
        is as of now. `take_memory` is told how many bytes the shard may be about to grow by, and
        raises Overloaded where it must not. Raises WrongEpoch, ForgottenPush, StalePush,
        NonFiniteGradient, ShapeMismatch, MalformedMessage or Overloaded, and then nothing has
        changed.
        """
        with self._body_lock:
            with self._lock:
                try:
                    outcome, fates, is_duplicate = self._push(push, is_live, take_memory)
                except Exception:
                    self._refused += 1
                    raise
            told()
            return PushResult(
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
        first = self._sessions.recall(push.session, push.sequence)
        if first is not None:
            self._duplicates += 1
            return first, self.body.fates(push.session, push.sequence), True
        if 0 < push.base_epoch < self.spec.first_epoch:
            # It may have been acknowledged before the shard was lost; what remembered it is gone.
            raise self._of_a_lost_one(push)
        record = PushRecord(
            session=push.session,
            sequence=push.sequence,
            version=self._version + 1,
            staleness=self._staleness(push),
            at_unix_s=push.at_unix_s,
            step=to_message(push.scope),
        )
        self.body.describe_push(push, record)
        # What is kept is what is applied, whatever its sender does to it.
        is_kept = push.is_borrowed and self._listener is not None
        data = self._keep(push.gradient) if is_kept else push.gradient
        batch = self.body.read_batch(record, data) if push.batch is None else push.batch
        take_memory(self.body.growth_bytes(batch, push.at_unix_s))
        record.forgotten_sessions.extend(self._sessions.make_room(push.session, is_live))
        is_lent = push.is_borrowed and not isinstance(data, bytes)
        return *self._apply(UpdateRecord(record, data, is_lent), batch), False

    def _of_a_lost_one(self, push: Push) -> StalePush:
        return StalePush(
            f"the gradients for shard {self.spec.shard_id} are of values that were lost",
            seen=f"values of epoch {push.base_epoch}",
            expected=f"values of epoch {self.spec.first_epoch} or later, in which it started over",
            fix="Pull the shard, or look its rows up, and compute the gradients again.",
        )

    def _staleness(self, push: Push) -> int:
        """How many updates of the shard the gradients do not know of."""
        if push.base_version <= self._version:
            return self._version - push.base_version
        if 0 < push.base_epoch < push.epoch:
            # That version died with a primary before anybody else had it.
            return 0
        raise MalformedMessage(
            f"the gradients for shard {self.spec.shard_id} have a base that does not exist",
            seen=f"base version {push.base_version}",
            expected=f"at most {self._version}",
            fix="Pull the shard again, or look its rows up again; it may have been made again.",
        )

    def _apply(self, record: UpdateRecord, batch: object) -> tuple[RememberedOutcome, bytes]:
        """All that a push changes, on the primary and on every copy alike: nothing in here may
        depend on anything but the shard and the record."""
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
        """Apply what the primary applied; the listener, if there is one, is told of it too.
        `is_borrowed`: the data are their sender's again once this returns.

        Raises InternalError if it is not the next version, ShapeMismatch or MalformedMessage if it
        is not a push of this shard; then nothing has changed.
        """
        with self._body_lock, self._lock:
            if record.push.version != self._version + 1:
                raise InternalError(
                    f"shard {self.spec.shard_id} was told of an update out of order",
                    seen=f"version {record.push.version}",
                    expected=f"version {self._version + 1}",
                )
            if is_borrowed and self._listener is not None:
                data = self._keep(record.data)
                record = UpdateRecord(record.push, data, is_lent=not isinstance(data, bytes))
            self._apply(record, self.body.read_batch(record.push, record.data))

    def try_enter(self) -> bool:
        """Whether nobody is at work on the body: then nobody else is, until `leave` is called in
        this thread, which may work on it."""
        return self._body_lock.acquire(blocking=False)

    def leave(self) -> None:
        """After a `try_enter` that was true."""
        self._body_lock.release()

    def read(self, work: Callable[[int], T]) -> T:
        """The result of what reads the body as of one version, which it is told."""
        with self._body_lock:
            return work(self._version)

    def subscribe(self, listener: UpdateListener | None, keep: Keep = bytes) -> None:
        """From now on `listener` is told of every push, in place of the one before it. `keep`, in
        the thread of the push, gives the data of one that are lent as they are applied, and as the
        listener is told of them."""
        with self._lock:
            self._listener, self._keep = listener, keep

    def enter_epoch(self, epoch: int) -> None:
        """Pushes of any other epoch are refused from now on, with WrongEpoch."""
        with self._lock:
            self.spec.epoch = epoch

    def cut(self, listener: UpdateListener | None = None) -> ShardCut:
        """All of it as of one version, to be read in chunks while pushes go on; `listener`, if
        given, is told of every push after exactly that version, in place of the one before it.

        Waits for a push that is being applied, and copies nothing while it has the shard's lock. To
        be closed. Any thread but the event loop's.
        """
        with self._body_lock:
            with self._lock:
                if listener is not None:
                    self._listener, self._keep = listener, bytes
                spec = self.body.spec_message(self.spec).SerializeToString(deterministic=True)
            frozen, version = self._sessions.freeze(), self._version
            content, small = self.body.cut()
        sessions = exported(frozen)
        header = CutHeader(
            shard_id=self.spec.shard_id, version=version, kind=self.body.kind, spec=spec
        )
        return ShardCut(
            header,
            content=content,
            rest=rest_of(sessions, small(sessions)),
            lock=self._body_lock,
            cuts=self.body.cuts,
        )

    def image(self, listener: UpdateListener | None = None) -> Image:
        """A copy of all of it as of one version, made while pushes go on; for `listener` see
        `cut`."""
        with self.cut(listener) as cut:
            return Image(
                kind=cut.header.kind,
                shard_id=self.spec.shard_id,
                version=cut.version,
                spec=cut.header.spec,
                tensors=cut.tensors(),
                sessions=cut.sessions,
            )

    def describe(self, job: str) -> ShardState:
        """Counters and sizes, for people; without the lock, so that nobody waits for it."""
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
