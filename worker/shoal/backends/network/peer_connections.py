"""Check if the other ranks of a Gloo group are still connected.

After a write to a connection that was just reset, Gloo may wait until the collective's time limit.
The end of the generation aborts such a wait only in the trainer.
"""

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.network import retired
from shoal.backends.network.sockets import count_connected
from shoal.backends.network.stores import AddressStore
from shoal.torch_private.c10d import backend_on
from shoal_proto.errors import GenerationBroken

LOOK_EVERY_S = 0.5
STUCK_AFTER_S = 5.0
"""Time in which a collective should fail once a rank has closed its connection."""

_stores: weakref.WeakKeyDictionary[Any, AddressStore] = weakref.WeakKeyDictionary()


def connected_by(gloo: Any, addresses: AddressStore) -> None:
    """Register the store of the group's addresses."""
    _stores[gloo] = addresses


class PeerConnections:
    """Connections of one Gloo group. Used only by the thread that waits for its collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._addresses = _stores[backend_on(group, torch.device("cpu"))]
        self._lost_s: float | None = None

    def wait(self, work: dist.Work) -> None:
        """Wait for the collective. Raises RuntimeError if it failed, and GenerationBroken if it
        does not end although a rank has closed its connection."""
        ended = threading.Event()
        work.get_future().add_done_callback(_setting(ended))
        while not ended.wait(LOOK_EVERY_S):
            self._check_connected()
        work.wait()

    def _check_connected(self) -> None:
        now_s = time.monotonic()
        if count_connected(self._addresses.announced) >= self._group.size() - 1:
            self._lost_s = None
            return
        self._lost_s = self._lost_s or now_s
        if now_s - self._lost_s > STUCK_AFTER_S:
            retired.keep_for_ever([self._group])
            raise GenerationBroken(
                "a collective did not end although a rank of its group has closed its connection",
                seen=f"not all {self._group.size()} connected for {STUCK_AFTER_S:g} s",
            )


def _setting(ended: threading.Event) -> Callable[[Any], None]:
    """Return a callback that refers to nothing but the event."""
    return lambda _: ended.set()
