"""The Rendezvous service: a key-value space for each generation that is in force.

It lives in memory only. If the leader dies while a generation is brought up, its successor says so
at once and the members form the next one; once it is up, torch.distributed does not ask it again.
"""

import asyncio
from dataclasses import dataclass, field

from shoal_proto.errors import DeadlineExceeded, GenerationBroken, NotLeader, Overloaded
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousServicer
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.serving.rpc import Context

MAX_SPACE_BYTES = 64 * 1024 * 1024
MAX_KEYS = 1_000_000
MAX_WAIT_S = 600.0


@dataclass(kw_only=True)
class KeySpace:
    """The keys of one generation."""

    values: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    waiting: dict[str, list[asyncio.Future[None]]] = field(default_factory=dict)

    def set(self, key: str, value: bytes) -> None:
        grown = self.num_bytes + len(value) - len(self.values.get(key, b""))
        if grown > MAX_SPACE_BYTES or (key not in self.values and len(self.values) >= MAX_KEYS):
            raise Overloaded(
                "the rendezvous store of this generation is full",
                seen=f"{grown} bytes in {len(self.values)} keys",
                expected=f"at most {MAX_SPACE_BYTES} bytes in {MAX_KEYS} keys",
            )
        self.num_bytes = grown
        self.values[key] = value
        for waiter in self.waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def delete(self, key: str) -> bool:
        value = self.values.pop(key, None)
        self.num_bytes -= len(value or b"")
        return value is not None

    async def wait_for(self, key: str) -> None:
        while key not in self.values:
            waiter = asyncio.get_running_loop().create_future()
            self.waiting.setdefault(key, []).append(waiter)
            await waiter

    def give_up(self, error: Exception) -> None:
        for waiters in self.waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(error)
        self.waiting.clear()


class RendezvousService(RendezvousServicer):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._spaces: dict[tuple[str, int], KeySpace] = {}

    def _space(self, token: Token) -> KeySpace:
        """The space of the token's generation. Raises Fenced, GenerationBroken."""
        actor = self._registry.find(token.job)
        actor.authorize_generation(token)
        key = (token.job, token.generation)
        if key not in self._spaces and token.generation <= actor.inherited_generation:
            # Who waits for a key that was set there would wait for nothing.
            raise GenerationBroken(
                f"the keys of generation {token.generation} of job {token.job} are lost",
                seen="a coordinator that took over after they were set",
                fix="Report it as broken; the next generation has keys of its own.",
            )
        return self._spaces.setdefault(key, KeySpace())

    def drop_dead(self, job: str) -> None:
        """Free what belongs to generations of the job that are over; who waits there is told."""
        actor = self._registry.actor_if_known(job)
        alive = actor.generations_in_force() if actor else []
        for key in [k for k in self._spaces if k[0] == job and k[1] not in alive]:
            self._spaces.pop(key).give_up(
                GenerationBroken(
                    f"generation {key[1]} of job {job} is over",
                    fix="Settle and wait for the next generation.",
                )
            )

    def forget_all(self) -> None:
        """Let every key go: another coordinator leads, which has none of them."""
        spaces, self._spaces = list(self._spaces.values()), {}
        for space in spaces:
            space.give_up(NotLeader("this coordinator does not lead any more"))

    async def Set(self, request: pb.StoreSetRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        for pair in request.pairs:
            before = space.values.get(pair.key, b"") if request.append else b""
            space.set(pair.key, before + pair.value)
        return pb.StoreReply()

    async def Get(self, request: pb.StoreGetRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        try:
            async with asyncio.timeout(min(request.timeout_s, MAX_WAIT_S)):
                for key in request.keys:
                    await space.wait_for(key)
        except TimeoutError:
            missing = [key for key in request.keys if key not in space.values]
            raise DeadlineExceeded(
                f"keys were not set within {request.timeout_s:g} s",
                seen=f"{len(space.values)} keys",
                expected=", ".join(missing[:10]),
            ) from None
        values = [] if request.wait_only else [space.values.get(key, b"") for key in request.keys]
        return pb.StoreReply(values=values)

    async def Add(self, request: pb.StoreAddRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        count = int(space.values.get(request.key, b"0")) + request.amount
        # As text, as torch's own stores keep counters, since they may be read by `get`.
        space.set(request.key, str(count).encode())
        return pb.StoreReply(count=count)

    async def CompareSet(
        self, request: pb.StoreCompareSetRequest, context: Context
    ) -> pb.StoreReply:
        space = self._space(request.token)
        value = space.values.get(request.key)
        if value == request.expected or (value is None and not request.expected):
            space.set(request.key, request.desired)
            value = request.desired
        # torch's contract: with no value there, and another expected, the expected one is returned.
        return pb.StoreReply(values=[value if value is not None else request.expected])

    async def Delete(self, request: pb.StoreKeysRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        return pb.StoreReply(count=sum(space.delete(key) for key in request.keys))

    async def Count(self, request: pb.StoreKeysRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        if not request.keys:
            return pb.StoreReply(count=len(space.values))
        return pb.StoreReply(count=sum(key in space.values for key in request.keys))
