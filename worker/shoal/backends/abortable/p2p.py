"""Sends and receives whose waits end when the group is cut, even if Gloo does not end them.

Gloo never reports the failure of a message that is written to a connection just after its reset. So
another thread waits for Gloo, and the trainer for that thread.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import AbortableWaiter, waiting
from shoal.torch_private.c10d import batched, takes_batches


class P2PMessage(Protocol):
    """A message in progress."""

    def wait(self) -> Any: ...


class AbortableP2P:
    """Messages of one rank in one group. One thread at a time waits for them. torch's pipelining
    can use this object in place of the process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._waiter = AbortableWaiter(group)
        # On a GPU a wait is queued on the waiting thread's stream, and returns at once.
        self._waits_in_thread = device.type == "cpu"
        self._device = device
        self.takes_batches = takes_batches(group, device)
        """True if messages wait for each other unless they are posted as a batch."""
        self._orders: _Orders = queue.SimpleQueue()
        self._end_thread: Callable[[], object] | None = None

    @property
    def group_name(self) -> str:
        """Name by which torch's pipelining (since 2.14) tells groups apart."""
        name: str = self.group.group_name
        return name

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> P2PMessage:
        """Begin to send the only tensor of the list to rank `to` of the group."""
        return self._wrapped(self.group.send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> P2PMessage:
        """Begin to receive the only tensor of the list from rank `source` of the group."""
        return self._wrapped(self.group.recv(tensors, source, tag))

    def exchange(self, sends: Sequence[tuple[Tensor, int]], receives: "Receives" = ()) -> None:
        """Send and receive tensors, each given with its destination or source rank. Raises
        RuntimeError if a message fails, also because of a cut."""
        if sends or receives:
            self.begin(sends, receives).wait()

    def begin(
        self, sends: Sequence[tuple[Tensor, int]], receives: "Receives" = (), tag: int = 0
    ) -> P2PMessage:
        """Begin to send and receive. Returns one message for all; it fails if any of them fails. No
        message waits for another: over NCCL, two ranks that send to each other could otherwise wait
        for ever."""

        def begin() -> list[P2PMessage]:
            works: list[P2PMessage] = [
                self.group.send([_real(tensor)], to, tag) for tensor, to in sends
            ]
            works += [self.group.recv([_real(each)], peer, tag) for each, peer in receives]
            return works

        if self.takes_batches:
            return self._wrapped(batched(self.group, self._device, begin))
        return self._wrapped(_MessageList(begin()))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with the tensor of the group's rank `source`. Raises
        DistBackendError if that fails, also because of a cut."""
        self._waiter.wait(dist.broadcast(tensor, group=self.group, group_src=source, async_op=True))

    def close(self) -> None:
        """End the waiting thread after its waits. Does not block; may be called twice."""
        if self._end_thread is not None:
            self._end_thread()
            self._end_thread = None

    def _wrapped(self, work: P2PMessage) -> P2PMessage:
        return _Message(work, self._await) if self._waits_in_thread else work

    def _await(self, work: P2PMessage) -> None:
        if self._end_thread is None:
            # The earlier thread may still wait for a message that Gloo does not end.
            self._orders = queue.SimpleQueue()
            # The thread also ends if the owner does not call `close`.
            self._end_thread = weakref.finalize(self, self._orders.put, None)
            arguments = (self._orders,)
            threading.Thread(
                target=_wait_for_orders, args=arguments, name="shoal-p2p", daemon=True
            ).start()
        completion = self._waiter.new_completion()
        self._orders.put((work, partial(self._waiter.complete, completion)))
        with waiting:
            reason = completion.wait()
        self._waiter.forget()
        if reason:
            self.close()
            # Every backend recognises this class as a failure of the group.
            raise dist.DistBackendError(reason)


def _wait_for_orders(orders: "_Orders") -> None:
    """Wait for each message. A message is dropped afterwards, as it would keep the group alive."""
    while (order := orders.get()) is not None:
        work, end = order
        try:
            work.wait()
            reason = ""
        except RuntimeError as error:
            reason = str(error) or "a message failed without a reason"
        end(reason)
        del order, work, end


_Orders = queue.SimpleQueue[tuple[P2PMessage, Callable[[str], None]] | None]
Receives = Sequence[tuple[Tensor, int]]


class _MessageList:
    def __init__(self, messages: Sequence[P2PMessage]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for each in self._messages:
            each.wait()


class _Message:
    def __init__(self, work: P2PMessage, wait: Callable[[P2PMessage], None]) -> None:
        self._work, self._await = work, wait

    def wait(self) -> None:
        self._await(self._work)


def _real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs: not every backend supports them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
