"""The Rendezvous service: a key-value store for each generation in force.

The keys are in memory only: if the leader dies during a bring-up, the members form the next
generation. After bring-up, torch.distributed uses the store only for further process groups.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from shoal_proto.deflated import pack
from shoal_proto.errors import (
    DeadlineExceeded,
    GenerationBroken,
    InvalidSpec,
    NotLeader,
    Overloaded,
)
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousServicer
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.serving.admission.config import JobLimits
from shoal_server.serving.rpc import Context

KEY_BYTES = 128
"""Memory of a key beside its text."""
MAX_COUNTER_BYTES = 20
MAX_ANSWERED = 16_384
PACKED_BYTES = 16 * 1024
"""Total size of values from which a reply is compressed."""


@dataclass(kw_only=True, eq=False)
class WaitingCalls:
    """Waiting calls that request the same keys, of which the same are missing."""

    keys: tuple[str, ...]
    missing: set[str]
    num_waiting: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None


@dataclass(kw_only=True)
class KeySpace:
    """The keys of one generation."""

    limits: JobLimits = field(default_factory=JobLimits)
    values: dict[str, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    _answered: dict[int, int] = field(default_factory=dict)
    """Newest calls that may not be carried out twice, by id, with the counts in their answers."""
    _newest_calls: dict[tuple[str, ...], WaitingCalls] = field(default_factory=dict)
    """Waiting calls that further calls may join, by wanted keys."""
    _calls_lacking: dict[str, list[WaitingCalls]] = field(default_factory=dict)
    """Waiting calls by missing key."""
    _answer: tuple[tuple[str, ...], bytes] = ((), b"")
    """Last encoded reply with its keys; empty after a change."""

    def set(self, key: str, value: bytes) -> None:
        """Set a key, and wake the calls that lack no other. Raises Overloaded beyond the limits."""
        held = self.values.get(key)
        grown = self.num_bytes + len(value)
        grown += _taken_by(key) if held is None else -len(held)
        num_keys = len(self.values) + (held is None)
        if grown > self.limits.rendezvous_bytes or num_keys > self.limits.rendezvous_keys:
            raise Overloaded(
                "the rendezvous store of this generation is full",
                seen=f"{grown} bytes in {num_keys} keys",
                expected=f"at most {self.limits.rendezvous_bytes} bytes, keys counted too, in"
                f" {self.limits.rendezvous_keys} keys",
                fix="Delete keys that are not needed any more, or start the coordinator with more"
                " --rendezvous-bytes and --rendezvous-keys.",
            )
        self.num_bytes = grown
        self.values[key] = value
        self._answer = ((), b"")
        for calls in self._calls_lacking.pop(key, ()):
            calls.missing.discard(key)
            if not calls.missing:
                self._forget(calls)
                calls.over.set()

    def append(self, pairs: Iterable[tuple[str, bytes]], call_id: int) -> None:
        """Append to values, once per `call_id` unless it is 0."""
        if call_id not in self._answered:
            for key, value in pairs:
                self.set(key, self.values.get(key, b"") + value)
            self._note_answer(call_id, 0)

    def add(self, key: str, amount: int, call_id: int) -> int:
        """Add to a counter, once per `call_id` unless it is 0, and return the sum. Raises
        InvalidSpec for a value that is no counter."""
        if (count := self._answered.get(call_id)) is not None:
            return count
        count = _counter(key, self.values.get(key, b"0")) + amount
        # Text, as in torch's own stores: `get` may read counters.
        self.set(key, str(count).encode())
        self._note_answer(call_id, count)
        return count

    def _note_answer(self, call_id: int, count: int) -> None:
        if call_id:
            self._answered[call_id] = count
        if len(self._answered) > MAX_ANSWERED:
            del self._answered[next(iter(self._answered))]

    def delete(self, key: str) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.num_bytes -= len(value) + _taken_by(key)
        self._answer = ((), b"")
        return True

    async def wait_for(self, keys: tuple[str, ...]) -> None:
        """Return once each key has been set, even if one was deleted since. Raises the error of
        `give_up`."""
        missing = {key for key in keys if key not in self.values}
        if not missing:
            return
        calls = self._newest_calls.get(keys)
        if calls is None or calls.missing != missing:
            # A key was set and deleted meanwhile: earlier calls do not wait for it.
            calls = self._newest_calls[keys] = WaitingCalls(keys=keys, missing=missing)
            for key in missing:
                self._calls_lacking.setdefault(key, []).append(calls)
        calls.num_waiting += 1
        try:
            await calls.over.wait()
        finally:
            calls.num_waiting -= 1
            if not calls.num_waiting and not calls.over.is_set():
                self._forget(calls)
        if calls.error is not None:
            raise calls.error

    def _forget(self, calls: WaitingCalls) -> None:
        if self._newest_calls.get(calls.keys) is calls:
            del self._newest_calls[calls.keys]
        for key in calls.missing:
            self._calls_lacking[key].remove(calls)
            if not self._calls_lacking[key]:
                del self._calls_lacking[key]

    def reply(self, keys: tuple[str, ...]) -> bytes:
        """Encoded reply with the values, empty for missing keys; shared by successive callers."""
        if self._answer[0] != keys:
            values = [self.values.get(key, b"") for key in keys]
            reply = pb.StoreReply(values=values)
            if sum(map(len, values)) >= PACKED_BYTES:
                reply = pb.StoreReply(deflated=pack(reply))
            self._answer = (keys, reply.SerializeToString())
        return self._answer[1]

    def give_up(self, error: Exception) -> None:
        """Fail all waiting calls with the error."""
        waiting, self._calls_lacking, self._newest_calls = self._calls_lacking, {}, {}
        for calls in chain.from_iterable(waiting.values()):
            calls.error = error
            calls.over.set()


class RendezvousService(RendezvousServicer):
    def __init__(self, registry: Registry, limits: JobLimits | None = None) -> None:
        self._registry = registry
        self.limits = limits or JobLimits()
        self._spaces: dict[tuple[str, int], KeySpace] = {}

    def _space(self, token: Token) -> KeySpace:
        """Key space of the token's generation. Raises what `Registry.find_for` and
        `JobActor.authorize_generation` raise, and GenerationBroken if the keys are lost."""
        actor = self._registry.find_for(token)
        actor.authorize_generation(token)
        key = (token.job, token.generation)
        if key not in self._spaces and token.generation <= actor.inherited_generation:
            # Only the last leader had the keys.
            raise GenerationBroken(
                f"the keys of generation {token.generation} of job {token.job} are lost",
                seen="a coordinator that took over after they were set",
                fix="Report the generation as broken; the next one has its own keys.",
            )
        return self._spaces.setdefault(key, KeySpace(limits=self.limits))

    @property
    def held(self) -> tuple[int, int]:
        """Number of bytes and keys in all generations' stores."""
        spaces = self._spaces.values()
        return sum(each.num_bytes for each in spaces), sum(len(each.values) for each in spaces)

    def drop_dead(self, job: str) -> None:
        """Drop the key spaces of the job's ended generations; their waiting calls fail."""
        actor = self._registry.actor_if_known(job)
        alive = actor.generations_in_force() if actor else []
        for key in [k for k in self._spaces if k[0] == job and k[1] not in alive]:
            self._spaces.pop(key).give_up(
                GenerationBroken(
                    f"generation {key[1]} of job {job} is over",
                    fix="Report your step (`Settle`), and wait for the next generation.",
                )
            )

    def forget_all(self) -> None:
        """Drop every key space."""
        spaces, self._spaces = list(self._spaces.values()), {}
        for space in spaces:
            space.give_up(NotLeader("this coordinator does not lead any more"))

    async def Set(self, request: pb.StoreSetRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        if request.append:
            space.append(((pair.key, pair.value) for pair in request.pairs), request.call_id)
            return pb.StoreReply()
        for pair in request.pairs:
            space.set(pair.key, pair.value)
        return pb.StoreReply()

    # Many callers may share encoded bytes.
    async def Get(  # type: ignore[override]
        self, request: pb.StoreGetRequest, context: Context
    ) -> bytes:
        space, keys = self._space(request.token), tuple(request.keys)
        wait_s = min(request.timeout_s, self.limits.rendezvous_wait_s)
        try:
            async with asyncio.timeout(wait_s):
                await space.wait_for(keys)
        except TimeoutError:
            missing = [key for key in keys if key not in space.values]
            raise DeadlineExceeded(
                f"keys were not set within {wait_s:g} s",
                seen=f"{len(space.values)} keys",
                expected=", ".join(missing[:10]),
                fix="For longer waits, start the coordinator with more --rendezvous-wait-s."
                if wait_s < request.timeout_s
                else "",
            ) from None
        return space.reply(keys)

    async def Add(self, request: pb.StoreAddRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        return pb.StoreReply(count=space.add(request.key, request.amount, request.call_id))

    async def CompareSet(
        self, request: pb.StoreCompareSetRequest, context: Context
    ) -> pb.StoreReply:
        space = self._space(request.token)
        value = space.values.get(request.key)
        if value == request.expected or (value is None and not request.expected):
            space.set(request.key, request.desired)
            value = request.desired
        # torch's contract: without a value, the expected one is returned.
        return pb.StoreReply(values=[value if value is not None else request.expected])

    async def Delete(self, request: pb.StoreKeysRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        return pb.StoreReply(count=sum(space.delete(key) for key in request.keys))

    async def Count(self, request: pb.StoreKeysRequest, context: Context) -> pb.StoreReply:
        space = self._space(request.token)
        if not request.keys:
            return pb.StoreReply(count=len(space.values))
        return pb.StoreReply(count=sum(key in space.values for key in request.keys))


def _taken_by(key: str) -> int:
    return len(key.encode()) + KEY_BYTES


def _counter(key: str, value: bytes) -> int:
    try:
        if len(value) <= MAX_COUNTER_BYTES:
            return int(value)
    except ValueError:
        pass  # raised below
    raise InvalidSpec(
        f"the value of {key[:100]!r} is not a counter",
        seen=repr(value[:40]),
        expected="a whole number",
        fix="Use a separate key for the counter.",
    )
