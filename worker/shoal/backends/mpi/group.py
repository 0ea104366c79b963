"""torch.distributed over MPI, by mpi4py, among the ranks that `mpiexec` started. CPU tensors only;
the ranks of a job are fixed.

Run `mpiexec -n 4 python train.py`, with `shoal.distribute(model, optimizer)` in the script, or
`shoal.init_mpi()` for torch.distributed alone.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.backends.mpi.buffers import (
    StagedTensor,
    copy,
    deliver,
    joined,
    octets,
    split,
    split_all,
    vector,
)
from shoal.backends.mpi.world import MpiWorld, Requests
from shoal.backends.process_group.collectives import CollectiveGroup
from shoal.backends.process_group.pending import Pending
from shoal.torch_private.c10d import HashStore
from shoal_proto.errors import InvalidSpec

PLUGIN = "shoal_mpi"
TIMEOUT_S = 1800.0


def init_mpi(timeout_s: float = TIMEOUT_S) -> None:
    """Initialise torch.distributed's default group with the ranks that mpiexec started.

    `timeout_s` limits each wait for another rank. An uncaught error on one rank makes the waits of
    all others raise, and the job ends with an error. Raises InvalidSpec if `timeout_s` is not above
    0.
    """
    global _world  # noqa: PLW0603 - MPI is initialised once for a process
    if not timeout_s > 0:
        raise InvalidSpec("timeout_s is out of range", seen=f"{timeout_s}", expected="above 0")
    if _world is None:
        _world = MpiWorld(timeout_s)
    _world.timeout_s = timeout_s
    dist.init_process_group(
        PLUGIN,
        store=HashStore(),
        rank=_world.rank,
        world_size=_world.size,
        timeout=timedelta(seconds=timeout_s),
    )


class MpiGroup(CollectiveGroup):
    """A rank's view of a group: an MPI communicator."""

    def __init__(
        self, world: MpiWorld, communicator: MPI.Intracomm, name: str, timeout_s: float
    ) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size(), name, timeout_s)
        self._world = world
        self._comm = communicator

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return PLUGIN

    def abort(self) -> None:
        self._world.fail(f"rank {self._world.rank} aborted")

    def all_reduce_each(self, tensors: list[Tensor], op: Any) -> dist.Work:
        staged = [StagedTensor(tensor, op, self.size()) for tensor in tensors]
        return self._start(
            "all_reduce",
            tensors,
            [self._comm.Iallreduce(MPI.IN_PLACE, each.numbers, each.op) for each in staged],
            lambda: deliver(staged),
        )

    def reduce_each(self, tensors: list[Tensor], op: Any, root: int) -> dist.Work:
        staged = [StagedTensor(tensor, op, self.size()) for tensor in tensors]
        is_root = self.rank() == root
        requests = [
            self._comm.Ireduce(MPI.IN_PLACE, each.numbers, each.op, root)
            if is_root
            else self._comm.Ireduce(each.numbers, None, each.op, root)
            for each in staged
        ]
        return self._start("reduce", tensors, requests, lambda: deliver(staged if is_root else []))

    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work:
        flats = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Ibcast(octets(flat), root) for flat in flats]
        return self._start("broadcast", tensors, requests, lambda: copy(flats, tensors))

    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        received = [joined(parts, fill=False) for parts in outputs]
        sent = [tensor.contiguous() for tensor in inputs]
        requests = [
            self._comm.Iallgatherv(octets(tensor), vector(whole, parts))
            for tensor, whole, parts in zip(sent, received, outputs, strict=True)
        ]
        whole_outputs = [tensor for parts in outputs for tensor in parts]
        return self._start(
            "all_gather", whole_outputs, requests, lambda: split_all(received, outputs), sent
        )

    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work:
        received, sent = joined(outputs or [tensor.new_empty(0)], fill=False), tensor.contiguous()
        into = vector(received, outputs) if self.rank() == root else None
        request = self._comm.Igatherv(octets(sent), into, root)
        return self._start("gather", outputs, [request], lambda: split(received, outputs), sent)

    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work:
        received, sent = output.contiguous(), joined(inputs or [output.new_empty(0)], fill=True)
        scattered = vector(sent, inputs) if self.rank() == root else None
        request = self._comm.Iscatterv(scattered, octets(received), root)
        return self._start("scatter", [output], [request], lambda: copy([received], [output]), sent)

    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        sent = [StagedTensor(joined(parts, fill=True), op, self.size()) for parts in inputs]
        received = [StagedTensor(output, op, self.size()) for output in outputs]
        requests = [
            self._comm.Ireduce_scatter(
                whole.numbers, part.numbers, [each.numel() for each in parts], part.op
            )
            for whole, part, parts in zip(sent, received, inputs, strict=True)
        ]
        return self._start("reduce_scatter", outputs, requests, lambda: deliver(received), sent)

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        received, sent = joined(outputs, fill=False), joined(inputs, fill=True)
        request = self._comm.Ialltoallv(vector(sent, inputs), vector(received, outputs))
        return self._start("all_to_all", outputs, [request], lambda: split(received, outputs), sent)

    def start_barrier(self) -> dist.Work:
        return self._start("barrier", [], [self._comm.Ibarrier()], lambda: None)

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        sent = tensor.contiguous()
        request = self._comm.Isend(octets(sent), to, tag)
        return self._start("send", [tensor], [request], lambda: None, sent)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        received = tensor.contiguous()
        origin = MPI.ANY_SOURCE if source is None else source
        flight = self._world.launch([self._comm.Irecv(octets(received), origin, tag)], received)
        return _Received(self, flight, received, tensor)

    def _start(
        self,
        what: str,
        tensors: Sequence[Tensor],
        requests: list[MPI.Request],
        deliver: Callable[[], None],
        memory: Any = None,
    ) -> "_Requested":
        # MPI writes to memory that `deliver` refers to, and reads from `memory`.
        flight = self._world.launch(requests, (deliver, memory))
        return _Requested(self, what, tensors, flight, deliver)


class _Requested(Pending):
    def __init__(
        self,
        group: MpiGroup,
        what: str,
        tensors: Sequence[Tensor],
        flight: Requests,
        deliver: Callable[[], None],
    ) -> None:
        super().__init__(tensors, group.timeout_s)
        self._world, self._what = group._world, what
        self._flight, self._deliver = flight, deliver
        self._finished = False

    def finish(self, timeout_s: float) -> None:
        if not self._finished:
            self._world.wait(self._flight, self._what, timeout_s)
            with torch.no_grad():
                self._deliver()
            self._finished = True

    def is_completed(self) -> bool:
        return self._flight.is_complete()


class _Received(_Requested):
    """Checks the length, as MPI would accept a shorter message."""

    def __init__(self, group: MpiGroup, flight: Requests, received: Tensor, tensor: Tensor) -> None:
        super().__init__(group, "recv", [tensor], flight, self._deliver_checked)
        self._received, self._tensor = received, tensor

    def _deliver_checked(self) -> None:
        status = self._flight.statuses[0]
        came, wanted = (
            status.Get_count(MPI.BYTE),
            self._received.numel() * self._received.element_size(),
        )
        if came != wanted:
            reason = f"rank {status.Get_source()} sent {came} bytes, {wanted} are to be received"
            raise dist.DistBackendError(f"recv failed: {reason}")
        copy([self._received], [self._tensor])

    def _source_rank(self) -> int:
        return self._flight.statuses[0].Get_source()

    source_rank = _source_rank


_world: MpiWorld | None = None


def _create(options: Any, unused: Any) -> MpiGroup:
    if _world is None:
        raise InvalidSpec(f"the backend {PLUGIN} is initialised by shoal.init_mpi()")
    ranks = options.global_ranks_in_group
    communicator = _world.subset(ranks, options.group_id) if ranks else _world.data
    timeout_s = min(options.timeout.total_seconds(), _world.timeout_s)
    return MpiGroup(_world, communicator, options.group_id, timeout_s)


dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])
