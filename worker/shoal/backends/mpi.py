"""torch.distributed over MPI, by mpi4py: ranks are those that `mpiexec` started.

`mpiexec -n 4 python train.py`, and in the script `shoal.distribute(model, optimizer)`; or
`shoal.init_mpi()` for torch.distributed alone. CPU tensors; ranks are fixed for the job's life.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shoal.backends.collectives import CollectiveGroup
from shoal.backends.mpi_world import MpiWorld
from shoal.backends.pending import Pending
from shoal_proto.errors import InvalidSpec

PLUGIN = "shoal_mpi"
TIMEOUT_S = 1800.0
"""As torch's own backends have it."""

_Op: Any = dist.ReduceOp.RedOpType  # the stub has no members
_OPS = {
    _Op.SUM: MPI.SUM,
    _Op.AVG: MPI.SUM,
    _Op.PRODUCT: MPI.PROD,
    _Op.MIN: MPI.MIN,
    _Op.MAX: MPI.MAX,
    _Op.BAND: MPI.BAND,
    _Op.BOR: MPI.BOR,
    _Op.BXOR: MPI.BXOR,
}
_TYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
}
# MPI has no such numbers: they are reduced in single precision.
_HALVES = (torch.float16, torch.bfloat16)


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
    """One rank's view of a group: a communicator."""

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
        staged = [_Staged(tensor, op, self.size()) for tensor in tensors]
        return self._start(
            "all_reduce",
            tensors,
            [self._comm.Iallreduce(MPI.IN_PLACE, each.numbers, each.op) for each in staged],
            lambda: _deliver(staged),
        )

    def reduce_each(self, tensors: list[Tensor], op: Any, root: int) -> dist.Work:
        staged = [_Staged(tensor, op, self.size()) for tensor in tensors]
        here = self.rank() == root
        requests = [
            self._comm.Ireduce(MPI.IN_PLACE, each.numbers, each.op, root)
            if here
            else self._comm.Ireduce(each.numbers, None, each.op, root)
            for each in staged
        ]
        return self._start("reduce", tensors, requests, lambda: _deliver(staged if here else []))

    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work:
        flats = [tensor.contiguous() for tensor in tensors]
        requests = [self._comm.Ibcast(_octets(flat), root) for flat in flats]
        return self._start("broadcast", tensors, requests, lambda: _copy(flats, tensors))

    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        taken = [_joined(parts, fill=False) for parts in outputs]
        given = [tensor.contiguous() for tensor in inputs]
        requests = [
            self._comm.Iallgatherv(_octets(tensor), _vector(whole, parts))
            for tensor, whole, parts in zip(given, taken, outputs, strict=True)
        ]
        whole_outputs = [tensor for parts in outputs for tensor in parts]
        return self._start(
            "all_gather", whole_outputs, requests, lambda: _split_all(taken, outputs), given
        )

    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work:
        taken, given = _joined(outputs or [tensor[:0]], fill=False), tensor.contiguous()
        into = _vector(taken, outputs) if self.rank() == root else None
        request = self._comm.Igatherv(_octets(given), into, root)
        return self._start("gather", outputs, [request], lambda: _split(taken, outputs), given)

    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work:
        taken, given = output.contiguous(), _joined(inputs or [output[:0]], fill=True)
        handed_out = _vector(given, inputs) if self.rank() == root else None
        request = self._comm.Iscatterv(handed_out, _octets(taken), root)
        return self._start("scatter", [output], [request], lambda: _copy([taken], [output]), given)

    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        given = [_Staged(_joined(parts, fill=True), op, self.size()) for parts in inputs]
        taken = [_Staged(output, op, self.size()) for output in outputs]
        requests = [
            self._comm.Ireduce_scatter(
                whole.numbers, part.numbers, [each.numel() for each in parts], part.op
            )
            for whole, part, parts in zip(given, taken, inputs, strict=True)
        ]
        return self._start("reduce_scatter", outputs, requests, lambda: _deliver(taken), given)

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        taken, given = _joined(outputs, fill=False), _joined(inputs, fill=True)
        request = self._comm.Ialltoallv(_vector(given, inputs), _vector(taken, outputs))
        return self._start("all_to_all", outputs, [request], lambda: _split(taken, outputs), given)

    def meet(self) -> dist.Work:
        return self._start("barrier", [], [self._comm.Ibarrier()], lambda: None)

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        given = tensor.contiguous()
        request = self._comm.Isend(_octets(given), to, tag)
        return self._start("send", [tensor], [request], lambda: None, given)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        taken = tensor.contiguous()
        origin = MPI.ANY_SOURCE if source is None else source
        request = self._comm.Irecv(_octets(taken), origin, tag)
        return self._start("recv", [tensor], [request], lambda: _copy([taken], [tensor]), taken)

    def _start(
        self,
        what: str,
        tensors: Sequence[Tensor],
        requests: list[MPI.Request],
        deliver: Callable[[], None],
        memory: Any = None,
    ) -> "_Requested":
        # `deliver` holds what MPI writes to, `memory` what it reads.
        self._world.keep(requests, (deliver, memory))
        return _Requested(self, what, tensors, requests, deliver)


class _Requested(Pending):
    def __init__(
        self,
        group: MpiGroup,
        what: str,
        tensors: Sequence[Tensor],
        requests: list[MPI.Request],
        deliver: Callable[[], None],
    ) -> None:
        super().__init__(tensors, group.timeout_s)
        self._world, self._what = group._world, what
        self._requests, self._deliver = requests, deliver
        self._finished = False

    def finish(self, timeout_s: float) -> None:
        if not self._finished:
            self._world.wait(self._requests, self._what, timeout_s)
            with torch.no_grad():
                self._deliver()
            self._finished = True

    def is_completed(self) -> bool:
        return self._finished or bool(MPI.Request.Testall(self._requests))


class _Staged:
    """A tensor as MPI can reduce it, and the way back."""

    def __init__(self, tensor: Tensor, op: Any, size: int) -> None:
        if op not in _OPS or (tensor.dtype not in _TYPES and tensor.dtype not in _HALVES):
            raise InvalidSpec(
                "this reduction is not supported",
                seen=f"{op} of {tensor.dtype}",
                expected="sum, avg, product, min, max or bits, of a number that MPI knows",
            )
        self._tensor, self._divisor = tensor, size if op == _Op.AVG else 1
        self.op = _OPS[op]
        wide = tensor.float() if tensor.dtype in _HALVES else tensor
        self._flat = wide.contiguous()
        memory = _checked(self._flat).view(-1)
        self.numbers = [memory.view(torch.uint8).numpy(), memory.numel(), _TYPES[wide.dtype]]

    def deliver(self) -> None:
        if self._divisor > 1:
            self._flat.div_(self._divisor)
        if self._flat is not self._tensor:
            self._tensor.copy_(self._flat)


def _deliver(staged: Sequence[_Staged]) -> None:
    for each in staged:
        each.deliver()


def _checked(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise InvalidSpec(
            "the backend mpi moves tensors on the CPU only", seen=f"{tensor.device}", expected="cpu"
        )
    return tensor


def _octets(tensor: Tensor) -> list[Any]:
    return [_checked(tensor).view(-1).view(torch.uint8).numpy(), MPI.BYTE]


def _vector(whole: Tensor, parts: Sequence[Tensor]) -> list[Any]:
    """The parts that lie one behind the other in the memory of `whole`."""
    octets, kind = _octets(whole)
    return [octets, [part.numel() * part.element_size() for part in parts], kind]


def _joined(parts: Sequence[Tensor], *, fill: bool) -> Tensor:
    """Memory for all parts, one behind the other; with what they hold, or for what they will."""
    if fill:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _split(whole: Tensor, parts: Sequence[Tensor]) -> None:
    pieces = torch.split(whole, [part.numel() for part in parts])
    _copy([p.view(part.shape) for p, part in zip(pieces, parts, strict=True)], parts)


def _split_all(wholes: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> None:
    for whole, parts in zip(wholes, lists, strict=True):
        _split(whole, parts)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            target.copy_(source)


_world: MpiWorld | None = None


def _create(options: Any, unused: Any) -> MpiGroup:
    """For torch: the default group, or one more that `new_group` asked for."""
    if _world is None:
        raise InvalidSpec(f"the backend {PLUGIN} is begun with shoal.init_mpi()")
    ranks = options.global_ranks_in_group
    communicator = _world.subset(ranks, options.group_id) if ranks else _world.data
    timeout_s = min(options.timeout.total_seconds(), _world.timeout_s)
    return MpiGroup(_world, communicator, options.group_id, timeout_s)


dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])

__all__ = ["PLUGIN", "TIMEOUT_S", "MpiGroup", "init_mpi"]
