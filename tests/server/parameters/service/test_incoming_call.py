"""A call that its caller has given up keeps nothing: neither parts nor answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from shoal_proto.checksum import crc32
from shoal_proto.errors import ShoalError
from shoal_proto.pieces import ReadPiece
from shoal_server.parameters.service.incoming_call import IncomingCall
from shoal_server.parameters.shard.chunk_assembler import Budget, PieceAssembler, Reservation

DATA = b"gradient"


@dataclass(frozen=True)
class Part:
    shard_id: int
    assembler: PieceAssembler


class HeldParts:
    """Parts that are answered only by the test."""

    def __init__(self, num_parts: int) -> None:
        self.answers: list[asyncio.Future[str | ShoalError]] = []
        self.all_begun = asyncio.Event()
        self._num_parts = num_parts

    def apply(self, part: Part) -> "asyncio.Future[str | ShoalError]":
        self.answers.append(asyncio.get_running_loop().create_future())
        if len(self.answers) == self._num_parts:
            self.all_begun.set()
        return self.answers[-1]

    def refusal(self, shard_id: int, error: ShoalError) -> str:
        return f"{shard_id}: {error}"


async def pieces(num_shards: int) -> AsyncIterator[ReadPiece]:
    for shard_id in range(num_shards):
        yield ReadPiece(shard_id, 0, memoryview(DATA), crc32(DATA))


async def test_parts_without_an_answer_are_cancelled_when_the_call_is_given_up() -> None:
    """A caller that is gone leaves no part waiting, and no part of the server's budget reserved."""
    kind, budget = HeldParts(3), Budget(1024)
    with Reservation(budget) as reservation:
        call = IncomingCall[Part, str](kind, reservation)
        for shard_id in range(3):
            part = Part(shard_id, PieceAssembler(shard_id, [(0, len(DATA))]))
            call.expect(shard_id, lambda part=part: part)  # type: ignore[misc]
        async with aclosing(call.answers(pieces(3))) as batches:
            waiting = asyncio.ensure_future(anext(batches))
            async with asyncio.timeout(20):
                await kind.all_begun.wait()
                kind.answers[0].set_result("applied")
                assert await waiting == ["applied"]
    assert [answer.cancelled() for answer in kind.answers] == [False, True, True]
    assert budget.held_bytes == 0
