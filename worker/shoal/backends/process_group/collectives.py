"""A process group in Python, with torch's many names for collectives mapped to a few methods.

A subclass implements the eleven methods under "for the transport".
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.torch_private.c10d import all_groups
from shoal_proto.errors import ShapeMismatch


class Count(NamedTuple):
    """Calls and bytes of one kind of operation on one rank."""

    calls: int
    bytes: int
    """Size of the tensors: of inputs, or of outputs for `all_gather` and `recv`."""


# Untyped: torch's stubs are incomplete.
_ProcessGroup: Any = dist.ProcessGroup


class CollectiveGroup(_ProcessGroup):  # type: ignore[misc]
    """Base class of process groups in Python.

    Transport methods get tensors detached from autograd. Lists with a tensor for each rank are
    indexed by rank. `all_reduce_each`, `reduce_each` and `broadcast_each` get the tensors of one
    coalesced call.
    """

    def __init__(self, rank: int, size: int, name: str, timeout_s: float) -> None:
        super().__init__(rank, size)
        self._name = name
        self.timeout_s = timeout_s
        self.counts: dict[str, Count] = {}

    # --- for the transport ---

    @abstractmethod
    def all_reduce_each(self, tensors: list[Tensor], op: Any) -> dist.Work:
        """Reduce each tensor over the ranks, in place."""

    @abstractmethod
    def reduce_each(self, tensors: list[Tensor], op: Any, root: int) -> dist.Work:
        """Reduce each tensor on the root; the other ranks' tensors are unchanged."""

    @abstractmethod
    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work: ...

    @abstractmethod
    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Fill `outputs[i][rank]` with that rank's `inputs[i]`; sizes may differ between ranks."""

    @abstractmethod
    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work: ...

    @abstractmethod
    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work: ...

    @abstractmethod
    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        """Fill `outputs[i]` with the reduction of `inputs[i][own rank]`; sizes may differ between
        ranks."""

    @abstractmethod
    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        """Fill `outputs[rank]` with that rank's `inputs[own rank]`."""

    @abstractmethod
    def start_barrier(self) -> dist.Work: ...

    @abstractmethod
    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """Send without waiting for the receiver: pipeline schedules send before they receive."""

    @abstractmethod
    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work: ...

    # --- counting ---

    def _count(self, operation: str, tensors: Sequence[Tensor]) -> None:
        calls, moved = self.counts.get(operation, Count(0, 0))
        moved += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.counts[operation] = Count(calls + 1, moved)

    # --- torch's names ---

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend for the device's tensors. Since 2.14 torch asks before a batch of
        sends and receives."""
        return self

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def group_name(self) -> Any:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 - torch's
        return self._name

    def getSize(self) -> int:  # noqa: N802
        return int(self.size())

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_reduce", tensors)
        return self.all_reduce_each(_plain(tensors), _reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._count("reduce", tensors)
        return self.reduce_each(_plain(tensors), _reduction(opts), opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        self._count("broadcast", tensors)
        return self.broadcast_each(_plain(tensors), opts.rootRank)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        self._count("all_gather", [tensor for each in outputs for tensor in each])
        return self.all_gather_each([_plain(each) for each in outputs], _plain(inputs))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """See `allgather`, but with `outputs[rank][i]`, as torch swaps the indices here."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return self.allgather([self._parts(whole, part) for whole, part in pairs], inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [part])

    _allgather_base = all_gather_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        self._count("gather", inputs)
        received = _plain(outputs[0]) if outputs else []
        return self.gather_one(received, _plain(inputs)[0], opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        self._count("scatter", inputs[0] if inputs else [])
        handed_out = _plain(inputs[0]) if inputs else []
        return self.scatter_one(_plain(outputs)[0], handed_out, opts.rootRank)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        self._count("reduce_scatter", [tensor for each in inputs for tensor in each])
        wholes = [_plain(each) for each in inputs]
        return self.reduce_scatter_each(_plain(outputs), wholes, _reduction(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(inputs, outputs, strict=True)
        wholes = [self._parts(whole, part) for whole, part in pairs]
        return self.reduce_scatter(outputs, wholes, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        self._count("all_to_all", inputs)
        return self.exchange(_plain(outputs), _plain(inputs))

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: list[int] | None,
        given_sizes: list[int] | None,
        opts: Any = None,
    ) -> dist.Work:
        return self.alltoall(self._rows(output, output_sizes), self._rows(given, given_sizes))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        self._count("barrier", [])
        return self.start_barrier()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        self._count("send", tensors)
        return self.send_one(_plain(tensors)[0], to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        self._count("recv", tensors)
        return self.receive_one(_plain(tensors)[0], source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        self._count("recv", tensors)
        return self.receive_one(_plain(tensors)[0], None, tag)

    def _parts(self, whole: Tensor, part: Tensor) -> list[Tensor]:
        size, num_ranks = part.numel(), self.size()
        if whole.numel() != size * num_ranks:
            raise ShapeMismatch(
                "the parts of all ranks do not make up the whole",
                seen=f"a whole of {whole.numel()} elements, {num_ranks} parts of {size}",
                expected=f"a whole of {size * num_ranks} elements",
                fix="Pass uneven parts as a list of tensors.",
            )
        flat = whole.view(-1)
        return [flat[rank * size : (rank + 1) * size] for rank in range(num_ranks)]

    def _rows(self, tensor: Tensor, sizes: list[int] | None) -> list[Tensor]:
        num_rows, num_ranks = len(tensor), self.size()
        if not sizes and num_rows % num_ranks:
            raise ShapeMismatch(
                "rows cannot be divided evenly among the ranks",
                seen=f"{num_rows} rows for {num_ranks} ranks",
                fix="Give the number of rows for each rank.",
            )
        return list(torch.split(tensor, sizes or [num_rows // num_ranks] * num_ranks))


def counts(group: dist.ProcessGroup | None = None) -> dict[str, Count]:
    """Return this rank's calls and bytes in a group, or in all of its groups, by operation.

    A coalesced operation is one call. Only groups of the backends `in-memory` and `mpi` count.
    """
    total: dict[str, Count] = {}
    for each in _counting(group):
        for operation, count in each.counts.items():
            calls, moved = total.get(operation, Count(0, 0))
            total[operation] = Count(calls + count.calls, moved + count.bytes)
    return total


def reset_counts(group: dist.ProcessGroup | None = None) -> None:
    """Set the counts of a group, or of all of this rank's groups, to zero."""
    for each in _counting(group):
        each.counts = {}


def _counting(group: dist.ProcessGroup | None) -> list[CollectiveGroup]:
    groups = [group] if group is not None else list(all_groups())
    return [each for each in groups if isinstance(each, CollectiveGroup)]


def _plain(tensors: Sequence[Tensor]) -> list[Tensor]:
    # `data`, not `detach()`: autograd does not see a collective's writes, as in C++.
    return [tensor.data for tensor in tensors]


def _reduction(options: Any) -> Any:
    return options.reduceOp.op if options is not None else dist.ReduceOp.SUM
