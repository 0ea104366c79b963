"""torch.distributed over MPI, by mpi4py, among the ranks that `mpiexec` started.

Run `mpiexec -n 4 python train.py`, with `shoal.distribute(model, optimizer)` in the script, or
`shoal.init_mpi()` for torch.distributed alone. CPU tensors only; the ranks of a job are fixed.
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
from shoal.backends.mpi.world import Flight, MpiWorld
from shoal.backends.process_group.collectives import CollectiveGroup
from shoal.backends.process_group.pending import Pending
from shoal.torch_private.c10d import HashStore
from shoal_proto.errors import InvalidSpec

PLUGIN = "shoal_mpi"
TIMEOUT_S = 1800.0
"""The same as that of torch's own backends."""


def init_mpi(timeout_s: float = TIMEOUT_S) -> None:
    """Initialise torch.distributed's default group with the ranks that mpiexec started.

    `timeout_s` limits each wait for another rank. A rank that raises makes the waits of all
    others raise, and the job ends with an error.
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
    """One rank's view of a group: an MPI communicator."""

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
        here = self.rank() == root
        requests = [
            self._comm.Ireduce(MPI.IN_PLACE, each.numbers, each.op, root)
            if here
            else self._comm.Ireduce(each.numbers, None, each.op, root)
            for each in staged
        ]
        return self._start("reduce", tensors, requests, lambda: deliver(staged if here else []))

    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work:
        flats = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Ibcast(octets(flat), root) for flat in flats]
        return self._start("broadcast", tensors, requests, lambda: copy(flats, tensors))

    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        taken = [joined(parts, fill=False) for parts in outputs]
        given = [tensor.contiguous() for tensor in inputs]
        requests = [
            self._comm.Iallgatherv(octets(tensor), vector(whole, parts))
            for tensor, whole, parts in zip(given, taken, outputs, strict=True)
        ]
        whole_outputs = [tensor for parts in outputs for tensor in parts]
        return self._start(
            "all_gather", whole_outputs, requests, lambda: split_all(taken, outputs), given
        )

    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work:
        taken, given = joined(outputs or [tensor.new_empty(0)], fill=False), tensor.contiguous()
        into = vector(taken, outputs) if self.rank() == root else None
        request = self._comm.Igatherv(octets(given), into, root)
        return self._start("gather", outputs, [request], lambda: split(taken, outputs), given)

    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work:
        taken, given = output.contiguous(), joined(inputs or [output.new_empty(0)], fill=True)
        handed_out = vector(given, inputs) if self.rank() == root else None
        request = self._comm.Iscatterv(handed_out, octets(taken), root)
        return self._start("scatter", [output], [request], lambda: copy([taken], [output]), given)

    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        given = [StagedTensor(joined(parts, fill=True), op, self.size()) for parts in inputs]
        taken = [StagedTensor(output, op, self.size()) for output in outputs]
        requests = [
            self._comm.Ireduce_scatter(
                whole.numbers, part.numbers, [each.numel() for each in parts], part.op
            )
            for whole, part, parts in zip(given, taken, inputs, strict=True)
        ]
        return self._start("reduce_scatter", outputs, requests, lambda: deliver(taken), given)

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        taken, given = joined(outputs, fill=False), joined(inputs, fill=True)
        request = self._comm.Ialltoallv(vector(given, inputs), vector(taken, outputs))
        return self._start("all_to_all", outputs, [request], lambda: split(taken, outputs), given)

    def meet(self) -> dist.Work:
        return self._start("barrier", [], [self._comm.Ibarrier()], lambda: None)

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        given = tensor.contiguous()
        request = self._comm.Isend(octets(given), to, tag)
        return self._start("send", [tensor], [request], lambda: None, given)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        taken = tensor.contiguous()
        origin = MPI.ANY_SOURCE if source is None else source
        flight = self._world.launch([self._comm.Irecv(octets(taken), origin, tag)], taken)
        return _Received(self, flight, taken, tensor)

    def _start(
        self,
        what: str,
        tensors: Sequence[Tensor],
        requests: list[MPI.Request],
        deliver: Callable[[], None],
        memory: Any = None,
    ) -> "_Requested":
        # `deliver` refers to the memory that MPI writes, `memory` to that which it reads.
        flight = self._world.launch(requests, (deliver, memory))
        return _Requested(self, what, tensors, flight, deliver)


class _Requested(Pending):
    def __init__(
        self,
        group: MpiGroup,
        what: str,
        tensors: Sequence[Tensor],
        flight: Flight,
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
        return self._flight.landed()


class _Received(_Requested):
    """Receive of a message. Checks its length, as MPI would accept a shorter message."""

    def __init__(self, group: MpiGroup, flight: Flight, taken: Tensor, tensor: Tensor) -> None:
        super().__init__(group, "recv", [tensor], flight, self._take)
        self._taken, self._tensor = taken, tensor

    def _take(self) -> None:
        status = self._flight.statuses[0]
        came, wanted = status.Get_count(MPI.BYTE), self._taken.numel() * self._taken.element_size()
        if came != wanted:
            reason = f"rank {status.Get_source()} sent {came} bytes, {wanted} are to be received"
            raise dist.DistBackendError(f"recv failed: {reason}")
        copy([self._taken], [self._tensor])

    def _source_rank(self) -> int:
        return self._flight.statuses[0].Get_source()

    source_rank = _source_rank


_world: MpiWorld | None = None


def _create(options: Any, unused: Any) -> MpiGroup:
    """Make a group for torch: the default group, or one that `new_group` asked for."""
    if _world is None:
        raise InvalidSpec(f"the backend {PLUGIN} is begun with shoal.init_mpi()")
    ranks = options.global_ranks_in_group
    communicator = _world.subset(ranks, options.group_id) if ranks else _world.data
    timeout_s = min(options.timeout.total_seconds(), _world.timeout_s)
    return MpiGroup(_world, communicator, options.group_id, timeout_s)


dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])
