"""The stream from this server to one that keeps copies of its shards."""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import grpc
import structlog

from shoal_proto.errors import ShoalError
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.holdings import Holder
from shoal_server.parameters import frames
from shoal_server.parameters.held import Held, num_bytes_of
from shoal_server.parameters.image import Image, Record
from shoal_server.parameters.outbox import Outbox
from shoal_server.parameters.patience import Patience
from shoal_server.parameters.streams import Stream, open_stream

log = structlog.get_logger(__name__)

REFUSAL_S = 0.2
"""A machine that is up refuses at once."""


class Peers(Protocol):
    """What a link asks of its owner."""

    async def address(self, holder: Holder) -> str | None:
        """Where the holder is reached; None if that process is gone."""
        ...

    def caught_up(self, link: "Link", held: Held) -> None:
        """The other end has the shard, and is told of every push from here on."""
        ...

    def refused(self, link: "Link", held: Held, error: ShoalError) -> None:
        """The other end does not take the shard."""
        ...

    def lost(self, link: "Link", reason: str) -> None:
        """The other end is gone, or silent; the link is over."""
        ...


class _Phase(Enum):
    WAITING = "its image is not taken yet"
    COPYING = "its image is being taken: what is applied meanwhile is kept"
    FOLLOWING = "told of every push"


@dataclass(slots=True)
class _Copy:
    held: Held
    phase: _Phase = _Phase.WAITING
    kept: list[Record] = field(default_factory=list)
    image_version: int = 0
    is_level: bool = False


Take = Callable[[Held], Awaitable[Image]]


class Link:
    """Lives on the event loop. `take` gives a shard's image without holding the loop up.

    A stream that breaks is opened again for a while, and then carries everything anew: what the
    old one lost, nobody knows.
    """

    def __init__(
        self, me: Holder, to: Holder, peers: Peers, take: Take, patience: Patience
    ) -> None:
        self.me = me
        self.to = to
        self._peers = peers
        self._take = take
        self._patience = patience
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._outbox = Outbox[_Copy]()
        self._wake = asyncio.Event()
        self._heard_s = 0.0
        self._unanswered_since_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"link-to-{self.to.server_id}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.end()

    @property
    def shards(self) -> list[Held]:
        """Those that the other end has, or is getting."""
        return [copy.held for copy in self._copies.values()]

    def follows(self, held: Held) -> bool:
        copy = self._copies.get((held.job, held.shard_id))
        return copy is not None and copy.held is held

    def is_sending(self, held: Held) -> bool:
        """Whether the shard's image is on its way, or arrived."""
        copy = self._copies.get((held.job, held.shard_id))
        return copy is not None and copy.held is held and copy.phase is not _Phase.WAITING

    def follow(self, held: Held) -> None:
        """Send the shard, then every push that is applied to it."""
        held.receipts.restart(self.to)
        copy = self._copies[held.job, held.shard_id] = _Copy(held)
        self._outbox.add_image(copy)
        self._wake.set()

    def unfollow(self, job: str, shard_id: int) -> None:
        copy = self._copies.pop((job, shard_id), None)
        if copy is not None:
            _let_go(copy)

    def tell(self, held: Held, record: Record) -> None:
        """A push was applied. To be called for each, in order."""
        copy = self._copies.get((held.job, held.shard_id))
        # What is applied before the image is taken is in the image, also if news of it comes later.
        if copy is None or copy.held is not held or copy.phase is _Phase.WAITING:
            return
        if copy.phase is _Phase.FOLLOWING and record.push.version <= copy.image_version:
            return
        held.unreplicated_bytes += num_bytes_of(record)
        if copy.phase is _Phase.COPYING:
            copy.kept.append(record)
        else:
            self._outbox.add(copy, record)
            self._wake.set()

    def end(self) -> list[Held]:
        """Follow nothing any more; what was followed."""
        shards = self.shards
        for copy, record in self._outbox.clear():
            copy.held.unreplicated_bytes -= num_bytes_of(record)
        for held in shards:
            self.unfollow(held.job, held.shard_id)
        return shards

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_s: float | None = None
        while True:
            address = await self._peers.address(self.to)
            if address is None:
                self._peers.lost(self, "its process is gone")
                return
            opened_s = loop.time()
            reason = await self._stream(address)
            log.warning("link_broke", to=self.to.server_id, reason=reason)
            if give_up_s is None or self._heard_s > opened_s:
                give_up_s = loop.time() + self._patience.reconnect_s
            if loop.time() >= give_up_s or await _refuses(address):
                self._peers.lost(self, reason)
                return
            for held in self.end():
                self.follow(held)
            await asyncio.sleep(self._patience.reconnect_s / 10)

    async def _stream(self, address: str) -> str:
        """Carry everything until it breaks; why it did."""
        self._unanswered_since_s = None
        try:
            async with open_stream(address) as stream:
                return await self._carry(stream, address)
        except (grpc.RpcError, ShoalError) as error:
            return str(_why(error, address))

    async def _carry(self, stream: Stream, address: str) -> str:
        tasks = [
            asyncio.create_task(work)
            for work in (self._write(stream), self._read(stream), self._await_silence())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=FIRST_COMPLETED)
            return "; ".join(str(_reason(task, address)) for task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, stream: Stream) -> None:
        hello = pb.Hello(
            primary=pb.Holder(server_id=self.me.server_id, incarnation=self.me.incarnation)
        )
        await stream.write(pb.FollowRequest(hello=hello))
        while True:
            while (next_up := self._outbox.next()) is not None:
                copy, record = next_up
                if record is None:
                    await self._send_image(stream, copy)
                else:
                    await self._send_record(stream, copy, record)
            self._wake.clear()
            try:
                async with asyncio.timeout(self._patience.beat_s):
                    await self._wake.wait()
            except TimeoutError:
                await self._send(stream, pb.FollowRequest(beat=pb.FollowBeat()))

    def _is_current(self, copy: _Copy) -> bool:
        return self._copies.get((copy.held.job, copy.held.shard_id)) is copy

    async def _send_record(self, stream: Stream, copy: _Copy, record: Record) -> None:
        held = copy.held
        held.unreplicated_bytes -= num_bytes_of(record)
        if self._is_current(copy):
            for request in frames.of_record(held.job, held.shard_id, held.epoch, record):
                await self._send(stream, request)

    async def _send_image(self, stream: Stream, copy: _Copy) -> None:
        if self._is_current(copy):
            for request in await self._image_of(copy):
                await self._send(stream, request)

    async def _image_of(self, copy: _Copy) -> Iterable[frames.Frame]:
        copy.phase = _Phase.COPYING
        image = await self._take(copy.held)
        copy.image_version = image.version
        copy.phase = _Phase.FOLLOWING
        kept, copy.kept = copy.kept, []
        # In front of all: the shard's later records lie there already, or come behind them.
        for record in reversed(kept):
            if record.push.version > image.version:
                self._outbox.put_first(copy, record)
            else:
                copy.held.unreplicated_bytes -= num_bytes_of(record)
        return frames.of_image(copy.held.job, copy.held.epoch, image)

    async def _send(self, stream: Stream, request: frames.Frame) -> None:
        if self._unanswered_since_s is None:
            self._unanswered_since_s = asyncio.get_running_loop().time()
        await stream.write(request)

    async def _read(self, stream: Stream) -> None:
        async for reply in stream.replies():
            self._heard_s = asyncio.get_running_loop().time()
            self._unanswered_since_s = None
            copy = self._copies.get((reply.job, reply.shard_id))
            if not reply.job or copy is None:
                continue
            if reply.HasField("error"):
                self.unfollow(reply.job, reply.shard_id)
                self._peers.refused(self, copy.held, from_detail(reply.error))
                continue
            if copy.phase is not _Phase.FOLLOWING or reply.version < copy.image_version:
                continue
            copy.held.receipts.received(self.to, reply.version)
            if not copy.is_level:
                copy.is_level = True
                self._peers.caught_up(self, copy.held)

    async def _await_silence(self) -> None:
        """Return once the other end has left something unanswered for too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._patience.beat_s)
            since_s = self._unanswered_since_s
            if since_s is not None and loop.time() - since_s >= self._patience.silence_s:
                return


async def _refuses(address: str) -> bool:
    """Whether that machine says that nobody listens there: then the process is gone, and to wait
    for it would hold up every push that it is to receive."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(REFUSAL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def _let_go(copy: _Copy) -> None:
    for record in copy.kept:
        copy.held.unreplicated_bytes -= num_bytes_of(record)
    copy.kept.clear()


def _why(error: grpc.RpcError | ShoalError, address: str) -> ShoalError:
    return error if isinstance(error, ShoalError) else from_rpc_error(error, address)


def _reason(task: asyncio.Task[None], address: str) -> str:
    error = task.exception()
    if isinstance(error, grpc.RpcError | ShoalError):
        return str(_why(error, address))
    if error is not None:
        # What grpcio raises for a write to a call that is over; its reader has the reason.
        log.debug("link_write_failed", address=address, reason=repr(error))
        return f"writing to {address} failed: {error!r}"
    return f"{address} says nothing any more"
