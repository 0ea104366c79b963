"""Rehearsal of one rank's part of a step, on the meta device: the model's own code runs with a
group that has no peers and counts calls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.process_group.collectives import CollectiveGroup, Count
from shoal.backends.process_group.pending import CompletedWork
from shoal.planning.figures import BACKWARD, FORWARD, Collective
from shoal.torch_private.tensors import pytree
from shoal_proto.errors import InvalidSpec


class RehearsalGroup(CollectiveGroup):
    """Group with only one rank present. Every collective ends at once and changes nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, f"rehearsal of rank {rank} of {size}", 0.0)

    def all_reduce_each(self, tensors: list[Tensor], op: Any) -> dist.Work:
        return CompletedWork(tensors, 0.0)

    def reduce_each(self, tensors: list[Tensor], op: Any, root: int) -> dist.Work:
        return CompletedWork(tensors, 0.0)

    def broadcast_each(self, tensors: list[Tensor], root: int) -> dist.Work:
        return CompletedWork(tensors, 0.0)

    def all_gather_each(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        return CompletedWork(inputs, 0.0)

    def gather_one(self, outputs: list[Tensor], tensor: Tensor, root: int) -> dist.Work:
        return CompletedWork([tensor], 0.0)

    def scatter_one(self, output: Tensor, inputs: list[Tensor], root: int) -> dist.Work:
        return CompletedWork([output], 0.0)

    def reduce_scatter_each(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any
    ) -> dist.Work:
        return CompletedWork(outputs, 0.0)

    def exchange(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        return CompletedWork(outputs, 0.0)

    def start_barrier(self) -> dist.Work:
        return CompletedWork([], 0.0)

    def send_one(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        return CompletedWork([tensor], 0.0)

    def receive_one(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        return CompletedWork([tensor], 0.0)

    def pop_counts(self) -> dict[str, Count]:
        """Return the counts since the last call, and reset them."""
        taken, self.counts = self.counts, {}
        return taken


class RehearsedPass:
    """Forward and backward pass on meta tensors, with the group's counts. Raises InvalidSpec if the
    model cannot be run on the meta device, or not with these inputs."""

    def __init__(self, group: RehearsalGroup, run: Callable[[], Any]) -> None:
        group.pop_counts()
        try:
            # Tensors that the model creates, such as masks, must be on meta too.
            with torch.enable_grad(), torch.device("meta"):
                self.outputs = run()
            self._forward = group.pop_counts()
            leaves = pytree.tree_leaves(self.outputs)
            ends = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise InvalidSpec(
                "what the model exchanges in a step cannot be computed beforehand",
                seen=f"{type(error).__name__}: {error}",
                expected="a model that runs on the meta device, and inputs= of a shape it accepts",
                fix="Plan without inputs; figures that depend on them are then left out.",
            ) from error
        self._backward = group.pop_counts()

    def collectives(self, times: int = 1) -> tuple[Collective, ...]:
        """Return the collectives of `times` passes like this one."""
        return tuple(
            Collective(
                kind=kind, when=when, calls=times * count.calls, num_bytes=times * count.bytes
            )
            for when, counts in ((FORWARD, self._forward), (BACKWARD, self._backward))
            for kind, count in counts.items()
        )
