"""Collectives and messages between ranks that are threads of one process. The last rank to arrive
computes for all, in the order of ranks, so results do not depend on the order of arrival."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_UNDELIVERED = 1024
"""Undelivered messages from one rank to another at which a further send waits."""

Complete = Callable[[list[Any]], None]


class Hub:
    """State that the ranks of one world share. Thread-safe."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.failure = ""
        self.ended: set[int] = set()
        self._forming: dict[tuple[str, tuple[int, ...]], list[SharedGroup]] = {}

    def fail(self, reason: str) -> None:
        """Make every wait of every rank raise, now and later. The first reason is kept."""
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Mark this rank as ended, which ends waits for it."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def join_group(self, name: str, ranks: Sequence[int], rank: int) -> "SharedGroup":
        """Join the group of this name as `rank`, and return it, the same object for each of its
        ranks."""
        key = (name, tuple(ranks))
        with self.changed:
            forming = self._forming.setdefault(key, [])
            # A rank may make a second group of the name before the other ranks made the first.
            group = next((each for each in forming if rank not in each.joined), None)
            if group is None:
                group = SharedGroup(self, tuple(ranks))
                forming.append(group)
            group.joined.add(rank)
            if len(group.joined) == len(group.ranks):
                forming.remove(group)
                if not forming:
                    del self._forming[key]
            return group

    def wait(
        self,
        done: Callable[[], bool],
        needed: Callable[[], Collection[int]],
        what: str,
        timeout_s: float,
    ) -> None:
        """Return once `done()` is True. Calls `fail` after `timeout_s`, or if a rank in `needed()`
        has ended. Raises DistBackendError once `fail` was called."""
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while not done():
                if self.failure:
                    raise dist.DistBackendError(f"{what} failed: {self.failure}")
                if ended_ranks := self.ended.intersection(needed()):
                    self.fail(
                        f"{what} cannot be completed: {rank_text(ended_ranks)} ended without it"
                    )
                elif (left_s := deadline_s - time.monotonic()) <= 0:
                    missing = rank_text(needed())
                    why = f": {missing} did not take part" if missing else ""
                    self.fail(f"{what} was not completed within {timeout_s:g} s{why}")
                else:
                    self.changed.wait(left_s)


class _Call:
    def __init__(self) -> None:
        self.posted: dict[int, tuple[str, Any]] = {}
        self.done = False
        self.error: Exception | None = None


class SharedGroup:
    """State that one group's ranks share. Arguments such as `rank` are positions in the group."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...]) -> None:
        self.hub = hub
        self.ranks = ranks
        self.joined: set[int] = set()
        self._calls: dict[int, _Call] = {}
        self._numbers: Counter[int] = Counter()
        self._stored: dict[tuple[int, int, int, int], Tensor] = {}
        self._sent: Counter[tuple[int, int, int]] = Counter()
        self._expected: Counter[tuple[int, int, int]] = Counter()
        self._undelivered: Counter[tuple[int, int]] = Counter()

    def post(self, rank: int, kind: str, given: Any, complete: Complete) -> _Call:
        """Add a rank's input to its next collective. The last rank computes the result. Raises
        DistBackendError once `Hub.fail` was called."""
        with self.hub.changed:
            if self.hub.failure:
                raise dist.DistBackendError(f"{kind} failed: {self.hub.failure}")
            number = self._numbers[rank]
            self._numbers[rank] += 1
            call = self._calls.setdefault(number, _Call())
            call.posted[rank] = (kind, given)
            if len(call.posted) < len(self.ranks):
                return call
            del self._calls[number]
        try:
            self._check_same_kind(call)
            with torch.no_grad():
                complete([call.posted[index][1] for index in range(len(self.ranks))])
        except Exception as error:  # noqa: BLE001 - raised on every rank, by `finish`
            call.error = error
        with self.hub.changed:
            call.done = True
            call.posted.clear()
            self.hub.changed.notify_all()
        return call

    def finish(self, call: _Call, kind: str, timeout_s: float) -> None:
        """Return once the collective is complete on all ranks. Raises what `Hub.wait` raises, and
        DistBackendError if the result could not be computed."""

        def needed() -> list[int]:
            if len(call.posted) == len(self.ranks):
                return []
            return [rank for index, rank in enumerate(self.ranks) if index not in call.posted]

        self.hub.wait(lambda: call.done, needed, kind, timeout_s)
        if call.error is not None:
            raise dist.DistBackendError(f"{kind} failed: {call.error}") from call.error

    def _check_same_kind(self, call: _Call) -> None:
        kinds = {kind for kind, _ in call.posted.values()}
        if len(kinds) > 1:
            calls = ", ".join(
                f"rank {self.ranks[index]}: {kind}"
                for index, (kind, _) in sorted(call.posted.items())
            )
            raise ValueError(f"the ranks of a group called different operations ({calls})")

    def send(self, source: int, to: int, tag: int, tensor: Tensor) -> None:
        """Store a copy of the tensor for the receiver, once fewer than MAX_UNDELIVERED messages of
        this sender to that receiver are stored. Raises what `Hub.wait` raises."""
        route = (source, to, tag)
        self.hub.wait(
            lambda: self._undelivered[source, to] < MAX_UNDELIVERED,
            lambda: [self.ranks[to]],
            f"send to rank {self.ranks[to]}",
            self.hub.timeout_s,
        )
        with self.hub.changed:
            if self.hub.failure:
                raise dist.DistBackendError(f"send failed: {self.hub.failure}")
            self._stored[(*route, self._sent[route])] = tensor.clone()
            self._sent[route] += 1
            self._undelivered[source, to] += 1
            self.hub.changed.notify_all()

    def next_receive(self, source: int, to: int, tag: int) -> int:
        """Count a receive on this route, and return the number of its message: receives complete in
        order."""
        with self.hub.changed:
            number = self._expected[source, to, tag]
            self._expected[source, to, tag] += 1
            return number

    def arrived(self, source: int, to: int, tag: int, number: int) -> bool:
        return (source, to, tag, number) in self._stored

    def receive(
        self, message_key: tuple[int, int, int, int], tensor: Tensor, timeout_s: float
    ) -> None:
        """Wait for the message, and fill the tensor with it. Raises what `Hub.wait` raises, and
        DistBackendError if the message has another size or dtype."""
        source, to, _, _ = message_key
        what = f"recv from rank {self.ranks[source]}"
        self.hub.wait(
            lambda: message_key in self._stored, lambda: [self.ranks[source]], what, timeout_s
        )
        with self.hub.changed:
            message = self._stored.pop(message_key)
            self._undelivered[source, to] -= 1
            self.hub.changed.notify_all()
        if message.shape.numel() != tensor.shape.numel() or message.dtype != tensor.dtype:
            raise dist.DistBackendError(
                f"{what} failed: {tuple(message.shape)} {message.dtype} was sent, "
                f"{tuple(tensor.shape)} {tensor.dtype} is to be received"
            )
        with torch.no_grad():
            tensor.copy_(message.view(tensor.shape))

    def any_source(self, to: int, tag: int, timeout_s: float) -> int:
        """Wait for a message that no receive expects yet; return its source rank."""

        def waiting() -> int | None:
            for source in range(len(self.ranks)):
                if self.arrived(source, to, tag, self._expected[source, to, tag]):
                    return source
            return None

        # Any rank could still send a message, so no particular rank is needed.
        self.hub.wait(lambda: waiting() is not None, list, "recv from any rank", timeout_s)
        with self.hub.changed:
            source = waiting()
        assert source is not None, "only this rank takes its messages"
        return source


def rank_text(ranks: Collection[int]) -> str:
    """Text such as "rank 1" or "ranks 1, 3"."""
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}" if ranks else ""
