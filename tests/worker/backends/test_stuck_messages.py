"""Messages whose wait Gloo does not end: later messages do not wait for them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from shoal.backends.abortable.p2p import AbortableP2P
from shoal.backends.abortable.waiter import waiters_of

WITHIN_S = 10.0


class Message(dist.Work):
    """A message that ends when the test sets `ended`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended = threading.Event(), threading.Event()

    def wait(self) -> bool:  # type: ignore[override]
        self.begun.set()
        return self.ended.wait()


class Group(dist.ProcessGroup):
    def __init__(self) -> None:
        super().__init__(0, 2)
        self.messages: list[Message] = []

    def send(self, *_: object) -> Message:  # type: ignore[override]
        self.messages.append(Message())
        return self.messages[-1]


@pytest.mark.parametrize("closes", [True, False])
def test_a_message_after_a_cut_does_not_wait_for_one_that_never_ends(closes: bool) -> None:
    group = Group()
    p2p = AbortableP2P(group, torch.device("cpu"))
    (waiter,) = waiters_of(group)
    with ThreadPoolExecutor() as threads:
        try:
            wait = threads.submit(p2p.send([torch.zeros(1)], 1).wait)
            assert group.messages[0].begun.wait(WITHIN_S)
            waiter.abort("the group was cut")
            with pytest.raises(dist.DistBackendError, match="was cut"):
                wait.result(WITHIN_S)
            if closes:
                p2p.close()
            later = p2p.send([torch.zeros(1)], 1)
            group.messages[1].ended.set()
            threads.submit(later.wait).result(WITHIN_S)
        finally:
            group.messages[0].ended.set()
