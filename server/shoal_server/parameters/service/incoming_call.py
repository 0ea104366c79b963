"""A push or lookup in progress: its parts are received, applied and answered one by one."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from shoal_proto.errors import InternalError, MalformedMessage, ShoalError
from shoal_proto.pieces import AnyPiece
from shoal_server.parameters.shard.chunk_assembler import PieceAssembler, Reservation
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

MAX_PENDING_SHARDS = 8
"""Parts of one call, started and not answered yet, at which no further pieces are read."""

T = TypeVar("T")
PartT = TypeVar("PartT", bound="IncomingPart")
PartT_contra = TypeVar("PartT_contra", bound="IncomingPart", contravariant=True)
AnswerT = TypeVar("AnswerT")


class IncomingPart(Protocol):
    """A part of a call: a shard of a push, or an item of a lookup."""

    @property
    def shard_id(self) -> int:
        """Id that the part's pieces carry."""
        ...

    @property
    def assembler(self) -> PieceAssembler: ...


class PartKind(Protocol[PartT_contra, AnswerT]):
    """Handler of the parts of a call."""

    def apply(self, part: PartT_contra) -> "asyncio.Future[AnswerT | ShoalError]":
        """Start to apply a complete part; return a future of its answer. A part that is cancelled
        before its turn is not applied."""
        ...

    def refusal(self, shard_id: int, error: ShoalError) -> AnswerT:
        """Return the answer for a part with an error; see `IncomingCall`."""
        ...


class IncomingCall(Generic[PartT, AnswerT]):
    """Receives a push or a lookup.

    An error in one part is that part's answer: its shard was not changed, or the change did not
    become as safe as the push demands. An error that concerns the whole call is raised.
    """

    def __init__(self, kind: PartKind[PartT, AnswerT], reservation: Reservation) -> None:
        self._kind = kind
        self._reservation = reservation
        self._parts: dict[int, PartT] = {}
        self._whole: PartT | None = None
        self._refused: set[int] = set()
        self._pending: deque[tuple[int, asyncio.Future[AnswerT | ShoalError]]] = deque()
        self._changed = asyncio.Event()
        self._is_over = False
        self._is_whole = False
        self.is_last = False
        """True if the newest answers are known to be the call's last. False also before the call's
        end was received."""

    def expect(self, shard_id: int, make: Callable[[], PartT]) -> None:
        """Expect the part that `make` returns. A ShoalError from `make` is the part's answer."""
        try:
            part = make()
        except ShoalError as error:
            self._refuse(shard_id, error)
            return
        if part.assembler.is_complete:
            self._start(part)
        else:
            self._parts[shard_id] = part

    async def answers(
        self, pieces: AsyncIterator[AnyPiece]
    ) -> AsyncGenerator[Sequence[AnswerT], None]:
        """Yield the parts' answers, in the order in which the parts were started or refused. If the
        caller stops early, waiting parts are not applied."""
        taking = asyncio.create_task(self._take_all(pieces), name="parts of a call")
        try:
            while self._pending or not self._is_over:
                if not self._pending:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                answers = [await self._settled(0)]
                while len(answers) < len(self._pending) and self._pending[len(answers)][1].done():
                    answers.append(await self._settled(len(answers)))
                self.is_last = self._is_whole and len(answers) == len(self._pending)
                yield answers
                for _ in answers:
                    self._pending.popleft()
                self._changed.set()
            await taking
        finally:
            # Drop unsent answers: each may have a whole shard's values, and wait for minutes for a
            # backup.
            begun = [pending for _, pending in self._pending]
            await cancel(taking, *begun)

    async def _settled(self, index: int) -> AnswerT:
        shard_id, pending = self._pending[index]
        answer = await pending
        self._reservation.release(shard_id)
        return self._kind.refusal(shard_id, answer) if isinstance(answer, ShoalError) else answer

    async def _take_all(self, pieces: AsyncIterator[AnyPiece]) -> None:
        try:
            async for piece in pieces:
                self._take(piece)
                while len(self._pending) >= MAX_PENDING_SHARDS:
                    self._changed.clear()
                    await self._changed.wait()
            self._start_whole()
            for shard_id, part in self._parts.items():
                self._refuse(shard_id, part.assembler.truncated())
            self._is_whole = True
        finally:
            self._is_over = True
            self._changed.set()

    def _take(self, piece: AnyPiece) -> None:
        shard_id = piece.shard_id
        if self._whole is not None and shard_id != self._whole.shard_id:
            self._start_whole()
        part = self._parts.get(shard_id, self._whole)
        if part is None or part.shard_id != shard_id:
            if shard_id not in self._refused:
                raise not_expected(shard_id, self._parts)
            return
        try:
            self._reservation.reserve(shard_id, part.assembler.expected_bytes)
            part.assembler.take(piece)
        except ShoalError as error:
            self._parts.pop(shard_id, None)
            self._whole = None
            self._refuse(shard_id, error)
            return
        if part.assembler.is_complete:
            # Started once another shard's piece, or the end, shows that the part was not too long.
            self._whole = self._parts.pop(shard_id)

    def _start_whole(self) -> None:
        if self._whole is not None:
            self._start(self._whole)
            self._whole = None

    def _start(self, part: PartT) -> None:
        self._add(part.shard_id, self._kind.apply(part))

    def _refuse(self, shard_id: int, error: ShoalError) -> None:
        self._refused.add(shard_id)
        answer: asyncio.Future[AnswerT | ShoalError] = asyncio.get_running_loop().create_future()
        answer.set_result(error)
        self._add(shard_id, answer)

    def _add(self, shard_id: int, answer: "asyncio.Future[AnswerT | ShoalError]") -> None:
        self._pending.append((shard_id, answer))
        self._changed.set()


def guarded(work: Callable[[], T], job: str, shard_id: int, what: str = "push") -> T | ShoalError:
    """Return the result of `work`, or the error for the answer. An error that is not a ShoalError
    is logged."""
    try:
        return work()
    except ShoalError as error:
        return error
    except Exception as error:
        log.exception(f"{what}_failed", job=job, shard_id=shard_id)
        return InternalError(f"the {what} failed", seen=repr(error))


def not_expected(shard_id: int, expected: Mapping[int, object]) -> ShoalError:
    """Return the error for a piece of an absent or complete shard."""
    return MalformedMessage(
        "an unexpected piece of a shard",
        seen=f"shard {shard_id}",
        expected=f"one of {sorted(expected)}" if expected else "no more pieces",
        fix="Name each shard in the header and send each of its bytes once.",
    )
