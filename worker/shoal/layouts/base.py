"""Base class of the layouts: their common part, and the methods that each one overrides.

A layout is made for the group of one generation, and knows nothing of membership. Its life, on the
trainer's thread except for `cut`:

    lay_out(model on meta, world) -> its parameters are filled in -> [open -> begin -> forward
      and backward, once or more -> reduce -> clip -> check -> optimizer -> stepped] per step

Errors of a collective are raised as the group raises them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.regions import KeptRegions
from shoal.layouts.gradients import name_of_fault
from shoal.layouts.layer_exchanges import LayerExchanges
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.model.gradients import watch_parameters
from shoal.model.local_parts import local_part
from shoal.model.tied_tensors import persistent_buffers
from shoal.state.shards import Chunk, TensorShard
from shoal.torch_private.dtensor import local_shape_and_offset
from shoal.torch_private.modules import buffer_table, parameter_table

LossFunction = Callable[[Any, Any], Tensor]
"""(outputs, targets) -> mean loss over samples."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that a model is laid out over, and this rank."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """Group of all ranks; also torch's default group, so that a DeviceMesh can be made."""
    generation: int = 0
    kept_regions: KeptRegions | None = None
    """Memory shared in the previous generation."""
    completes_passes: bool = False
    """True if gradients have to be those of the whole batch after each pass; else after
    `Layout.reduce`."""
    makes_passes: bool = False
    """True if `Layout.backward` makes all backward passes, as in a session."""
    exchanges: LayerExchanges = field(default_factory=LayerExchanges, repr=False, compare=False)
    """Record of the layers for which this rank has communicated."""

    def axis(self, name: str) -> str:
        """Return the name of a DeviceMesh dimension in this generation.

        DTensor caches a mesh's properties by ranks and names: with equal names, the cache would
        answer for an old mesh (seen in torch 2.13).
        """
        return f"{name}{self.generation}"


class Layout(ABC):
    """Part of a model on one rank (base class). All ranks compute steps together."""

    world: World
    module: nn.Module
    """The module that runs the user's model on this rank, within a step."""
    data_index: int = 0
    """Index of this rank's share of each batch, the same on ranks with the same samples."""
    data_count: int = 1
    elementwise: bool = True
    """True if parameters are sharded, and so need an optimizer that updates each element
    separately."""

    shares_loss: bool = False
    """True if `forward_backward` returns the last stage's loss on all ranks."""

    is_replicated: bool = False
    """True if every rank holds all parameters: norms and faults are the same on all ranks without a
    message."""

    exchanges_updates: bool = False
    """True if `stepped` sends updated parameters to other ranks."""

    looks_for_faults: bool = True
    """True if `reduce` or `check` raises for gradients that are not finite. If False, `overflowed`
    reports them."""

    unreached: Sequence[str] = ()
    """Parameters that the loss does not depend on, if gradients were not reduced for this
    reason."""

    step: int = 0
    """Number of steps committed before this one."""

    non_finite_check: NonFiniteCheck | None = None
    """Check that reports a fault to all ranks, if a rank sees only its own gradients."""

    faults_are_own: bool = False
    """True if `reduce` cannot make finite gradients infinite: `non_finite_check` then finds every
    fault before `reduce`."""

    @property
    def plain(self) -> nn.Module:
        """The model under the user's own names: `module`, or the model that `module` wraps."""
        return self.module

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters (plain or DTensor) that this rank's optimizer steps, by the user's names. A
        parameter of which this rank holds no element may be missing."""

    @property
    def held(self) -> Mapping[str, Tensor]:
        """Tensors of the model's state on this rank, by the user's names: `parameters` and
        persistent buffers."""
        return {**self.parameters, **persistent_buffers(self.plain)}

    def shard(self, name: str, tensor: Tensor) -> TensorShard:
        """Describe a tensor as a chunk of the whole one.

        `tensor`: one of `held`, or optimizer state in the shape of the parameter `name`. The
        shard's tensor is a view.
        """
        chunk, shape = self.chunk(name, tensor), tuple(tensor.shape)
        return TensorShard(shape=shape, chunk=chunk, tensor=local_part(tensor))

    def chunk(self, name: str, tensor: Tensor) -> Chunk:
        """Return the chunk of `shard`."""
        if not isinstance(tensor, DTensor):
            return Chunk.whole(tensor.shape)
        key = (name, tensor.shape, tensor.placements)
        if key not in self._chunks:
            self._chunks[key] = _chunk_of(tensor)
        return self._chunks[key]

    @cached_property
    def _chunks(self) -> dict[tuple[str, torch.Size, Any], Chunk]:
        # Computing a chunk takes 0.1 ms.
        return {}

    def is_counted_here(self, name: str) -> bool:
        """True if sums over ranks count this rank's shard of a tensor of `held`.

        Exactly one rank counts each element, adds it to norms and writes it to checkpoints. By
        default every rank counts its `parameters`, and rank 0 all else too.
        """
        return name in self.parameters or self.world.rank == 0

    def replicas(self, name: str) -> Sequence[int]:
        """Return the ranks with the same bits as this rank's chunk; each of them publishes a part.
        By default only this rank, if it counts the tensor, else none."""
        return (self.world.rank,) if self.is_counted_here(name) else ()

    def is_lost_with_rank(self, name: str) -> bool:
        """True if this rank's shard of this name is lost with the rank, so that peers need a copy;
        by default always. `name` begins with `model.` or `optim.`."""
        return True

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Memory that all ranks share, for use before a step; None if they share none."""
        return None

    @property
    def num_moved(self) -> int:
        """Number of exchanges that bypass the group. Thread-safe."""
        return 0

    def failure_domains(self, hosts: Sequence[str]) -> Sequence[str]:
        """Name each rank's failure domain, by default its host. Ranks of one domain may be lost
        together, so copies are placed in other domains."""
        return hosts

    @property
    def leaves(self) -> Sequence[Tensor] | None:
        """Leaf tensors to which autograd can limit a backward pass; None if they differ from pass
        to pass."""
        return None

    def watch(self, ours: Callable[[], bool]) -> None:
        """Make each later backward pass raise before its gradients reach other ranks, unless
        `ours()` is true: see `shoal.model.gradients.bare_backward`."""
        watch_parameters(self.plain.parameters(), ours)

    # --- a step ---

    def open(self) -> nn.Module:
        """Return `plain` as a step begins. A layout with its own memory first copies values that
        the script has assigned to parameters' `.data`."""
        return self.plain

    def begin(self) -> None:  # noqa: B027 - nothing to prepare is a fine default
        """Begin a step, at its first forward pass. May communicate."""

    def forget_gradients(self) -> None:  # noqa: B027 - most layouts keep nothing of a pass
        """Forget the gradients of earlier passes of the step, which the script has dropped."""

    reduces: bool = True
    """See `reduce_in_backward`."""

    def reduce_in_backward(self, reduces: bool) -> None:
        """Choose if later passes reduce their gradients over the ranks."""
        self.reduces = reduces

    @property
    def completes(self) -> bool:
        """True if gradients are to be the whole batch's after the pass that begins."""
        return self.reduces and self.world.completes_passes

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of the pass that begins. If it is not finite, `reduce` or `check` raises
        NonFiniteGradient on this rank and an error on every other."""
        assert self.non_finite_check is not None, "a layout without one overrides this"
        self.non_finite_check.losses.note(loss)

    def begin_pass(self, loss: Tensor) -> None:  # noqa: B027 - most layouts reduce by their hooks
        """Prepare a backward pass; `loss` is weighted already."""

    def end_pass(self) -> None:  # noqa: B027 - as `begin_pass`
        """End a pass."""

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add this rank's gradients of a loss, the mean over its own samples.

        `weight`: this rank's share of the global batch, times `data_count`.
        """
        loss = loss if weight == 1.0 else loss * weight
        self.begin_pass(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.end_pass()

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        """Run both passes, for layouts that interleave them. Returns the mean loss over this rank's
        samples, detached."""
        loss = loss_function(self.module(inputs), targets)
        self.backward(loss, weight)
        return loss.detach()

    def communicates_in_forward(self, *, is_first_step: bool) -> bool:
        """True if a forward pass with gradients communicates. `is_first_step`: True in the
        generation's first step."""
        return True

    def reduce(self) -> None:  # noqa: B027 - most layouts reduce in backward
        """Make the gradients of `parameters` those of the global batch."""

    def check(self) -> None:
        """Raise on every rank if any rank's own gradients are not finite.

        NonFiniteGradient is raised on the ranks at fault, GenerationBroken on the other ranks. If
        only a sum over ranks is not finite, at least the ranks that see it raise NonFiniteGradient.
        Called after `reduce`; may communicate.
        """
        if self.non_finite_check is not None:
            self.non_finite_check.check(self.parameters, self.step)

    def overflowed(self) -> bool:
        """True if this rank sees gradients that are not finite; in place of `check`."""
        return bool(name_of_fault(self.parameters))

    def share_buffers(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Set persistent buffers, such as running means, to the first rank's values on all ranks.
        Collective, before the optimizer steps."""

    def stepped(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Called after `optimizer.step()`. Communicates only if `exchanges_updates`."""

    def finish_passes(self) -> None:
        """End forward passes of all ranks outside of a step. Raises InvalidSpec on all ranks if
        ranks that split layers computed with different layers."""
        self.world.exchanges.check_outside_step(self.world.group)

    def names_without_gradient(self) -> Sequence[str]:
        """Name the trained parameters without a gradient on this rank, if all ranks have to compute
        with the same parameters."""
        return ()

    @property
    def names_stepped_elsewhere(self) -> Collection[str]:
        """Parameters that are whole on this rank, but that only another rank has stepped in this
        generation."""
        return ()

    def synchronised(self) -> bool:
        """True if every gradient of the step went through the layout, so that ranks cannot
        drift."""
        return True

    def release(self) -> None:  # noqa: B027 - most layouts keep no such references
        """Drop references to the group at its end, when `module` may still be referenced.

        Quick, raises nothing, may be called twice. No step follows.
        """

    def cut(self, reason: str) -> None:  # noqa: B027 - most layouts wait in the group only
        """End waits that bypass the group: they raise. Called on any thread after the group was
        aborted; quick."""

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Return the groups that were made for this layout."""
        return iter(())


LayOut = Callable[[nn.Module, World], Layout]
"""Lay a model over a world. The model's parameters are on the meta device, its buffers are real.
The layout's parameters are uninitialised. (Only `ReplicatedLayout` also takes real parameters, and
keeps their values.)"""


def shard_of(tensor: Tensor) -> TensorShard:
    """Return a plain tensor as a whole chunk, or this rank's part of a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return TensorShard.whole(tensor)
    return TensorShard(
        shape=tuple(tensor.shape), chunk=_chunk_of(tensor), tensor=local_part(tensor)
    )


def _chunk_of(tensor: DTensor) -> Chunk:
    sizes, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory for parameters on the meta device, and move buffers. Tied ones stay tied."""
    real = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in buffer_table(part).items()
        if buffer is not None and not buffer.is_meta
    ]
    tied = _tied(module)
    module.to_empty(device=device)
    for (part, name), (first, first_name) in tied:
        parameter_table(part)[name] = parameter_table(first)[first_name]
    # `to_empty` has replaced the real buffers: put them back.
    for part, name, buffer in real:
        buffer_table(part)[name] = buffer
    move_buffers(module, device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers. Tied ones stay tied."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for name, buffer in buffer_table(part).items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                buffer_table(part)[name] = moved[buffer]


def _tied(module: nn.Module) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """List each further (module, name) of a tied parameter with its first one."""
    first: dict[int, tuple[nn.Module, str]] = {}
    further = []
    for part in module.modules():
        for name, parameter in parameter_table(part).items():
            if parameter is not None:
                key = (part, name)
                if first.setdefault(id(parameter), key) is not key:
                    further.append((key, first[id(parameter)]))
    return further
