"""Groups on a CPU that behave like NCCL's, to find faults that otherwise only a GPU shows.

- A collective is complete as soon as it is begun: its future is set, but its result is not
available yet.
- The result is visible only after a wait for the work. On a GPU that holds for the stream of the
  waiting thread; here it holds for the thread.
- An aborted collective ends without an error, with half of its result.
- A message waits on its stream until its receiver has reached it there. Unlike NCCL, there is no
  buffer for the first few megabytes. Two ranks that both send first, one message at a time, wait
  for ever; messages of one batch are exchanged together. A batch uses the stream of the group, and
  any other message that of its pair of ranks.

The model is torch's ProcessGroupNCCL.cpp: `WorkNCCL` (complete once begun, `wait` as an order on
the stream), `abortComms`, and `pointToPoint`, which makes a communicator for each pair of ranks,
but uses the group's in a batch.

`int64` behaves as on the host, since members agree by such small messages; so does `uint8` outside
of a batch, as states are sent.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.collectives.strategy_runs import DefaultGroup
from torch import Tensor

from shoal.backends.in_memory import group as in_memory
from shoal.backends.in_memory.group import InMemoryGroup
from shoal.backends.in_memory.hub import Complete, SharedGroup
from shoal.backends.network.nccl import Aborts
from shoal.backends.process_group.pending import Pending
from shoal.torch_private.c10d import backends_on, batched
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import GenerationBroken

LEFT = [0.0]
"""Value of the missing half of an aborted collective's result: the last entry is in use."""


class Late(Pending):
    """Work whose results arrive when it is waited for."""

    def __init__(self, arrivals: Sequence[tuple[Tensor, Tensor]], group: Any) -> None:
        super().__init__([result for result, _ in arrivals], group.timeout_s)
        self._arrivals, self._group = arrivals, group

    def come(self, timeout_s: float) -> None:
        """Return once the results are there, or the group is aborted."""
        raise NotImplementedError

    def finish(self, timeout_s: float) -> None:
        self.come(timeout_s)
        arrivals, self._arrivals = self._arrivals, ()
        for result, arrived in arrivals:
            if self._group.aborted:
                half = result.view(-1)[: result.numel() // 2]
                half.fill_(self._group.left if half.is_floating_point() else 0)
            else:
                result.copy_(arrived)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with torch.no_grad():
            return super().wait(timeout)

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return not self._arrivals


class LateWork(Late):
    """Work of a collective."""

    def __init__(self, inner: Pending, arrivals: Sequence[tuple[Tensor, Tensor]], group: Any):
        super().__init__(arrivals, group)
        self._inner = inner

    def come(self, timeout_s: float) -> None:
        self._inner.finish(timeout_s)


class Message:
    """A side of a message, on the stream of its rank."""

    def __init__(self, tensor: Tensor, source: int, to: int, tag: int, *, is_send: bool) -> None:
        self.tensor, self.is_send = tensor, is_send
        self.route = (source, to, tag)
        self.is_through = False


class LateMessages(Late):
    """Work of the messages that one rank gave its group as a batch."""

    def __init__(self, messages: Sequence[Message], group: "LateGroup") -> None:
        received = [each for each in messages if not each.is_send]
        arrived = [each.tensor.detach().clone() for each in received]
        results = [each.tensor for each in received]
        super().__init__(list(zip(results, arrived, strict=True)), group)
        for each, into in zip(received, arrived, strict=True):
            each.tensor = into
        self.messages = messages

    def come(self, timeout_s: float) -> None:
        group = self._group
        group.shared_group.hub.wait(self._has_ended, list, "a message", timeout_s)

    def _has_ended(self) -> bool:
        return self._group.aborted or all(each.is_through for each in self.messages)


class Streams:
    """Messages of one communicator: a stream for each rank, in order."""

    def __init__(self) -> None:
        self._by_rank: dict[int, deque[LateMessages]] = {}

    def begin(self, rank: int, work: LateMessages) -> None:
        self._by_rank.setdefault(rank, deque()).append(work)
        while self._get_on():
            pass

    def _get_on(self) -> bool:
        """Transfer one message that is at the head of two streams; False if there is none."""
        for stream in self._by_rank.values():
            while stream and all(each.is_through for each in stream[0].messages):
                stream.popleft()
        heads = [stream[0] for stream in self._by_rank.values() if stream]
        waiting = [each for head in heads for each in head.messages if not each.is_through]
        for send in (each for each in waiting if each.is_send):
            for receive in waiting:
                if not receive.is_send and receive.route == send.route:
                    with torch.no_grad():
                        receive.tensor.copy_(send.tensor.view(receive.tensor.shape))
                    send.is_through = receive.is_through = True
                    return True
        return False


_streams: weakref.WeakKeyDictionary[SharedGroup, dict[object, Streams]] = (
    weakref.WeakKeyDictionary()
)
_HOST = (torch.int64, torch.uint8)


class LateGroup(InMemoryGroup):
    """An in-memory group that behaves like NCCL's, as the module describes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.aborted = False
        self.left = LEFT[-1]
        self._batch: list[Message] | None = None

    @property
    def supports_coalescing(self) -> bool:
        return True

    def abort(self) -> None:
        with self.shared_group.hub.changed:
            self.aborted = True
            self.shared_group.hub.changed.notify_all()

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        if self._batch is None and tensor.dtype in _HOST:
            return super().send_one(tensor, to, tag)
        return self._begin(Message(tensor, self.rank(), to, tag, is_send=True), to)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        if self._batch is None and tensor.dtype in _HOST:
            return super().receive_one(tensor, source, tag)
        assert source is not None, "NCCL receives from a rank that it knows"
        return self._begin(Message(tensor, source, self.rank(), tag, is_send=False), source)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        batch, self._batch = self._batch, None
        assert batch is not None, "begun"
        return self._put_on_stream("all", batch)

    def _begin(self, message: Message, peer: int) -> Any:
        if self._batch is not None:
            self._batch.append(message)
            return None
        return self._put_on_stream(frozenset((self.rank(), peer)), [message])

    def _put_on_stream(self, communicator: object, messages: Sequence[Message]) -> LateMessages:
        work = LateMessages(messages, self)
        changed = self.shared_group.hub.changed
        with changed:
            streams = _streams.setdefault(self.shared_group, {})
            streams.setdefault(communicator, Streams()).begin(self.rank(), work)
            changed.notify_all()
        return work

    def _post(
        self, kind: str, results: Sequence[Tensor], given: Any, complete: Complete
    ) -> Pending:
        if results and all(result.dtype is torch.int64 for result in results):
            return super()._post(kind, results, given, complete)
        # Other ranks write into copies, which are copied into the results at the wait.
        shadows: dict[int, Tensor] = {}

        def shadow(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return shadows.setdefault(id(leaf), leaf.detach().clone())

        inner = super()._post(kind, [], pytree.tree_map(shadow, given), complete)
        return LateWork(inner, [(each, shadows[id(each)]) for each in results], self)


class LateRunGroup(DefaultGroup):
    """The late groups of a run of ranks as the group of a generation, which can be cut."""

    def __init__(self) -> None:
        self._reason = ""

    def cut(self, reason: str) -> None:
        self._reason = reason
        aborts = Aborts()
        aborts.begin(backends_on(torch.device("cpu")))
        assert aborts.wait(30.0)

    def check(self) -> None:
        if self._reason:
            raise GenerationBroken("a collective was aborted", seen=self._reason)


def _batched(plain: Callable[..., Any], ops: list[dist.P2POp]) -> Any:
    """Batch operations as torch does for its own groups that support batches."""
    group: Any = ops[0].group
    if not isinstance(group, LateGroup):
        return plain(ops)

    def begin() -> None:
        for op in ops:
            op.op(op.tensor, group=group, tag=op.tag, **_peer(op))

    return [batched(group, torch.device("cpu"), begin)]


def _peer(op: dist.P2POp) -> dict[str, Any]:
    return {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}


@contextmanager
def late_groups(left: float = 0.0) -> Iterator[None]:
    """Make every in-memory group a late group within the block. `left`: value of the missing half
    of an aborted collective's result."""
    module: Any = in_memory
    module.InMemoryGroup = LateGroup
    plain = dist.batch_isend_irecv
    dist.batch_isend_irecv = functools.partial(_batched, plain)
    LEFT.append(left)
    try:
        yield
    finally:
        LEFT.pop()
        dist.batch_isend_irecv = plain
        module.InMemoryGroup = InMemoryGroup
