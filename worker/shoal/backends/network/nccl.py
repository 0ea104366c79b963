"""NCCL groups: collectives between GPUs, cut by aborting their communicators.

Tensors on the host go over Gloo in the same group: state between members, copies at peers, who
stands at which step. So a cut is both: NCCL's abort, and the end of Gloo's connections.
"""

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.network.sockets import shut_connections
from shoal.backends.network.stores import AnnouncingStore
from shoal.backends.process_group.interface import Seat, refuse_default_group
from shoal.torch_private.c10d import Store, abort_on, abort_process_group, fault_on
from shoal_proto.errors import GenerationBroken, InvalidSpec

_CUDA = torch.device("cuda")
_FAILURE_MARKS = ("nccl", "communicator was aborted", "watchdog", "gloo", "closed by peer")


class NcclBackend:
    """See `shoal.backends.process_group.interface.Backend`."""

    name = "nccl"
    is_watched = False

    def __init__(self) -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise InvalidSpec(
                "the backend nccl cannot be used here",
                seen="no CUDA device" if dist.is_nccl_available() else "a torch without NCCL",
                fix='Use backend="gloo".',
            )
        # A collective that fails or runs out of time has its communicator aborted, and no more:
        # torch would else end the process, which is to go on in the next generation.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")

    def group(self, seat: Seat, store: Store) -> "NcclGroup":
        return NcclGroup(seat, store)

    def is_failure(self, error: BaseException) -> bool:
        if isinstance(error, dist.DistError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(mark in text for mark in _FAILURE_MARKS)


class NcclGroup:
    """A `process_group.interface.Group` on the CUDA device that is current when it is opened."""

    def __init__(self, seat: Seat, store: Any) -> None:
        self._seat = seat
        self._store = AnnouncingStore(store)
        self._lock = threading.Lock()
        self._reason = ""
        self._group: dist.ProcessGroup | None = None

    def open(self) -> dist.ProcessGroup:
        refuse_default_group()
        self._raise_if_cut()
        seat = self._seat
        hook = sys.excepthook  # torch wraps it once more at each call, and never takes one off
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl",
                store=self._store,
                rank=seat.rank,
                world_size=seat.world_size,
                timeout=timedelta(seconds=seat.collective_s),
            )
        finally:
            sys.excepthook = hook
        group = dist.group.WORLD
        assert group is not None
        with self._lock:
            self._group = group
        self._raise_if_cut()
        # The communicator is made with the first collective; only now can `cut` abort it.
        try:
            work = group.allreduce([torch.zeros(1, device="cuda")])
            work.wait(timedelta(seconds=seat.bring_up_s))
            torch.cuda.current_stream().synchronize()
        except RuntimeError:
            self._raise_if_cut()
            raise
        self._raise_if_cut()
        return group

    def cut(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason or "the group was cut"
            group = self._group
        self._store.abort(self._reason)
        shut_connections(self._store.announced)
        if group is not None:
            # Also those of meshes and of copies at peers: whoever waits there is to be let go too.
            abort_on(_CUDA)

    def check(self) -> None:
        """An abort ends a collective well, with the half of what it was to bring (torchft, pull
        request 147). Each abort, of `cut` or of torch's watchdog, is known before it does that."""
        torch.cuda.current_stream().synchronize()
        if fault := self._reason or fault_on(_CUDA):
            raise GenerationBroken(
                f"a collective of generation {self._seat.generation} was aborted", seen=fault
            )

    def retire(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        if self._reason:
            # Destroying would wait for operations that never end.
            abort_process_group()
        else:
            dist.destroy_process_group()

    def keep_for_ever(self) -> None:
        """No operation outlives the abort of its communicator."""

    def _raise_if_cut(self) -> None:
        if self._reason:
            raise GenerationBroken(
                f"generation {self._seat.generation} ended while it was brought up",
                seen=self._reason,
            )
