"""NCCL groups: collectives between GPUs, cut by aborting their communicators.

Tensors on the host go over Gloo in the same group: transfers of state, peer checkpoints, votes.
"""

import os
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.communicators import connect
from shoal.backends.abortable.gather import barrier_after_collective, gather_padded
from shoal.backends.abortable.waiter import AbortableWaiter
from shoal.backends.network import retired
from shoal.backends.network.cuda_progress import DeviceProgress, cuda_progress
from shoal.backends.network.gloo import GlooBackend, GlooGroup
from shoal.backends.network.nccl_environment import require_survival
from shoal.backends.network.own_gpu import check_unshared
from shoal.backends.process_group.interface import Seat, ended_in_bring_up
from shoal.torch_private.c10d import Store, all_groups, backends_on, fault_on, forget_groups
from shoal_proto.errors import GenerationBroken, InvalidSpec

log = structlog.get_logger(__name__)

ABORTED_S = 10.0
"""Limit of the wait for the aborts of a generation's groups, in `retire`."""
_IDENTITY = struct.Struct("<64q")
"""A GPU's id as ranks exchange it: an int64 for each byte of the id, padded with zeros to 64. Must
not change between releases."""
_FAILURE_MARKS = ("nccl", "communicator was aborted", "watchdog")


class StreamedDevice(Protocol):
    """A device whose collectives can be aborted on its stream."""

    kind: str
    transport: str

    def identity(self) -> str:
        """Return an id of the device, equal on two ranks only if they share the device."""

    def connect(self, group: dist.ProcessGroup, waiter: AbortableWaiter) -> None:
        """Create the group's communicator."""

    def synchronise(self) -> None:
        """Wait for all work that was queued on the device."""

    def fault(self) -> str:
        """Return the error for which torch has aborted a group; "" if there is none."""


class Cuda:
    """The current CUDA device of the calling thread."""

    kind, transport = "cuda", "nccl"

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def connect(self, group: dist.ProcessGroup, waiter: AbortableWaiter) -> None:
        connect(group, torch.device("cuda", torch.cuda.current_device()), waiter)

    def synchronise(self) -> None:
        # Wait for all streams, including those that the script made.
        torch.cuda.synchronize()

    def fault(self) -> str:
        return fault_on(torch.device(self.kind))


class NcclBackend:
    """See `process_group.interface.Backend`."""

    name = "nccl"
    is_watched = True

    def __init__(self) -> None:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise InvalidSpec(
                "the backend nccl cannot be used here",
                seen="no CUDA device" if dist.is_nccl_available() else "a torch without NCCL",
                fix='Use backend="gloo".',
            )
        require_survival(os.environ)
        self._host = GlooBackend()
        self._progress: DeviceProgress | None = None

    def group(self, seat: Seat, store: Store) -> "NcclGroup":
        # The trainer's current device is the one to watch.
        device = torch.device("cuda", torch.cuda.current_device())
        self._progress = self._progress or cuda_progress(device)
        return NcclGroup(seat, store)

    def is_failure(self, error: BaseException) -> bool:
        if self._host.is_failure(error):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(mark in text for mark in _FAILURE_MARKS)

    def stalled_since_s(self, now_s: float) -> float | None:
        progress = self._progress
        return progress.stalled_since_s(now_s) if progress is not None else None


class NcclGroup:
    """A `process_group.interface.Group` on the CUDA device that is current in `open`."""

    def __init__(self, seat: Seat, store: Any, device: StreamedDevice | None = None) -> None:
        self._seat = seat
        self._device = device or Cuda()
        self._kind = torch.device(self._device.kind)
        beside = f"{self._device.kind}:{self._device.transport}"
        self._host = GlooGroup(seat, store, beside=beside)
        self._reason = ""
        self._connecting = AbortableWaiter(for_good=True)
        self._aborts = Aborts()

    def open(self) -> dist.ProcessGroup:
        group = self._host.open()
        try:
            self._check_unshared(group)
            self._device.connect(group, self._connecting)
        except RuntimeError:
            self._raise_if_cut()
            raise
        self._raise_if_cut()
        return group

    def cut(self, reason: str) -> None:
        # Set first: `check` needs the reason, as an aborted collective ends without an error.
        self._reason = self._reason or reason or "the group was cut"
        self._connecting.abort(self._reason)
        self._host.cut(self._reason)
        # Abort groups of device meshes too.
        self._aborts.begin(backends_on(self._kind))

    def check(self) -> None:
        """Raise GenerationBroken if a collective was aborted, by `cut` or by torch's watchdog.

        An aborted collective ends without an error, with an incomplete result (torchft, pull
        request 147).
        """
        self._device.synchronise()
        if fault := self._reason or self._device.fault():
            raise GenerationBroken(
                f"a collective of generation {self._seat.generation} was aborted", seen=fault
            )

    def retire(self) -> None:
        if not (self._reason or self._device.fault()):
            self._host.retire_group(dist.destroy_process_group, list(all_groups()))
            return
        # Abort groups made after the cut too, or all groups if torch's watchdog aborted one.
        self._aborts.begin(backends_on(self._kind))
        if not self._aborts.wait(ABORTED_S):
            log.warning(
                "abort_not_ended",
                generation=self._seat.generation,
                waited_s=ABORTED_S,
                consequence="its communicators keep their memory until the process ends",
            )
            retired.keep_for_ever(all_groups())
        # Destroying the groups would wait for operations that never end.
        self._host.retire_group(forget_groups, list(all_groups()))

    def keep_for_ever(self) -> None:
        self._host.keep_for_ever()

    def _check_unshared(self, group: dist.ProcessGroup) -> None:
        if group.size() == 1:
            return
        own = _IDENTITY.pack(*self._device.identity().encode().ljust(64, b"\0"))
        received = gather_padded(own, _IDENTITY.size, group, self._connecting.wait)
        gpus = [bytes(_IDENTITY.unpack(each)).rstrip(b"\0").decode() for each in received]
        if len(set(gpus)) < len(gpus):
            barrier_after_collective(group)
        check_unshared(gpus)

    def _raise_if_cut(self) -> None:
        if self._reason:
            raise ended_in_bring_up(self._seat.generation, self._reason)


class Aborts:
    """Aborts of a generation's groups on a device, made concurrently. Thread-safe.

    An abort may wait, in cudaFree, for a kernel of another group that waits for a lost peer
    (pytorch issue 119797).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[tuple[Any, threading.Thread]] = []
        """Aborted backends, kept so that no later backend has the same `id`."""

    def begin(self, backends: Iterable[Any]) -> None:
        """Begin to abort backends for which no abort has begun, without waiting."""
        with self._lock:
            known = {id(backend) for backend, _ in self._begun}
            for backend in backends:
                if id(backend) in known:
                    continue
                known.add(id(backend))
                thread = threading.Thread(
                    target=_abort, args=(backend,), name="shoal-abort", daemon=True
                )
                self._begun.append((backend, thread))
                thread.start()

    def wait(self, limit_s: float) -> bool:
        """Wait for all aborts, at most `limit_s`; return True if they have ended."""
        deadline_s = time.monotonic() + limit_s
        with self._lock:
            threads = [thread for _, thread in self._begun]
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning(
            "abort_failed",
            reason=str(error)[:300],
            consequence="operations of this group may occupy the GPU until the process ends",
        )
