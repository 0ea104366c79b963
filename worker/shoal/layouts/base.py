"""Base class of the layouts: their common part, and the methods that each one overrides.

A layout is made anew for each generation, from the same model and for the group of that
generation; it knows nothing of membership. Its life, all on the trainer's thread:

    lay_out(model on meta, world) -> its parameters are filled in
      -> [begin -> forward and backward, once or more -> reduce -> clip -> optimizer -> stepped]

It is dropped as a whole when the group is. Errors of a collective are the group's, as they come.
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
"""(outputs, targets) -> the mean loss over the samples."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks a model is laid out over, and the one that this process is."""

    rank: int
    world_size: int
    device: torch.device
    """The device that this rank computes on."""
    group: dist.ProcessGroup
    """All ranks; also torch's default group, so that a DeviceMesh can be made."""
    generation: int = 0
    kept_rooms: KeptRegions | None = None
    """Memory that this rank shared with others in the previous generation."""
    completes_passes: bool = False
    """True if gradients are those of the whole batch after each pass that `Layout` makes, and not
    only after `Layout.reduce`."""
    makes_passes: bool = False
    """True if `Layout.backward` makes all backward passes, as in a session, and the script's own
    loss.backward() makes none."""
    exchanges: LayerExchanges = field(default_factory=LayerExchanges, repr=False, compare=False)
    """Record of the layers for which this rank has met others."""

    def axis(self, name: str) -> str:
        """The name for a dimension of a DeviceMesh, another one in each generation.

        DTensor keeps what it has derived of a mesh by the mesh's ranks and names, and with it this
        process' place in that mesh: a mesh of as many ranks in which this process has another place
        would be mistaken for the old one (seen in torch 2.13: rows of another rank).
        """
        return f"{name}{self.generation}"


class Layout(ABC):
    """Base of a rank's part of a model; computes steps on it together with the other ranks."""

    world: World
    module: nn.Module
    """The module that runs a forward pass of the user's model on this rank, within a step."""
    data_index: int = 0
    """Index of this rank's share of each batch; ranks that work on the same samples share one."""
    data_count: int = 1
    """Number of shares of a batch."""
    elementwise: bool = True
    """True if parameters are sharded, so that only optimizers which update each element separately
    equal one process."""

    shares_loss: bool = False
    """True if `forward_backward` returns the loss of the last stage on all ranks."""

    looks_for_faults: bool = True
    """True if `reduce` raises for gradients that are not finite. Otherwise it leaves them, and
    `overflowed` reports them."""

    unreached: Sequence[str] = ()
    """Parameters that kept the gradients of the step from being reduced, as the loss does not
    depend on them."""

    step: int = 0
    """Number of steps committed before the present one, for the report of a fault in it."""

    non_finite_check: NonFiniteCheck | None = None
    """Check that reports a fault to the other ranks, if ranks see only their own gradients."""

    faults_are_own: bool = False
    """True if `reduce` leaves finite gradients finite on all ranks alike: then the only faults are
    those that ranks find in their own gradients before, in `non_finite_check`."""

    @property
    def plain(self) -> nn.Module:
        """The copied model with the user's own names: what is shown to the user and evaluated with.

        `module` itself, unless that wraps it.
        """
        return self.module

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters (plain or DTensor) that this rank's optimizer steps, by the user's names.

        A rank that holds nothing of a parameter may leave it out.
        """

    @property
    def held(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers that this rank holds, if only as a copy, by name in
        the user's model: its part of the model's state. At least `parameters`."""
        return {**self.parameters, **persistent_buffers(self.plain)}

    def shard(self, name: str, tensor: Tensor) -> TensorShard:
        """Describe a tensor of `held` as a chunk of the whole, or one of optimizer state that has
        the same shape as the parameter of this name. The shard's tensor is a view: writing it
        writes the parameter."""
        chunk, shape = self.chunk(name, tensor), tuple(tensor.shape)
        return TensorShard(shape=shape, chunk=chunk, tensor=local_part(tensor))

    def chunk(self, name: str, tensor: Tensor) -> Chunk:
        """Return the chunk of `shard` without its content."""
        if not isinstance(tensor, DTensor):
            return Chunk.whole(tensor.shape)
        key = (name, tensor.shape, tensor.placements)
        if key not in self._chunks:
            self._chunks[key] = _chunk_of(tensor)
        return self._chunks[key]

    @cached_property
    def _chunks(self) -> dict[tuple[str, torch.Size, Any], Chunk]:
        # To work one out takes 0.1 ms, and a state has some for each parameter.
        return {}

    def counts(self, name: str) -> bool:
        """True if sums over ranks count this rank's shard of a tensor of `held`.

        Each element is counted on exactly one rank: it enters norms there, and that rank writes
        it to checkpoints. By default: every rank for its `parameters`, the first for all else.
        """
        return name in self.parameters or self.world.rank == 0

    def replicas(self, name: str) -> Sequence[int]:
        """Ranks that hold the same chunk of one of `held` as this one, bit for bit, and publish it
        in parts among them. As it stands: this rank for what it `counts`, and else others."""
        return (self.world.rank,) if self.counts(name) else ()

    def travels(self, name: str) -> bool:
        """True if the shard of this name in a state (`model.`, `optim.`) is lost with this rank.

        Such shards are copied to peers. By default: all; a copy too many does no harm.
        """
        return True

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Memory that all ranks share, for use before a step; None if they share none."""
        return None

    @property
    def num_moved(self) -> int:
        """Counts what moves between ranks in steps outside of the group. Any thread."""
        return 0

    def lost_together(self, hosts: Sequence[str]) -> Sequence[str]:
        """Name, by rank, the failure domain: ranks of one name may be lost together, so copies lie
        on ranks of other names. By default: the host."""
        return hosts

    @property
    def leaves(self) -> Sequence[Tensor] | None:
        """The tensors that a backward pass ends in, where gradients of these alone can be asked
        for; None where each pass has others."""
        return None

    def watch(self, ours: Callable[[], bool]) -> None:
        """Raise, from now on, in a backward pass whose gradients are not `ours`, before other
        ranks get them: see `shoal.model.gradients.bare_backward`."""
        watch_parameters(self.plain.parameters(), ours)

    # --- a step ---

    def open(self) -> nn.Module:
        """A step begins: the model as `plain`, with its parameters in the memory where this layout
        keeps them. What the script has assigned to their `.data` since the last step counts."""
        return self.plain

    def begin(self) -> None:  # noqa: B027 - nothing to prepare is a fine default
        """Called at the beginning of a step, with no gradients there. May communicate."""

    reduces: bool = True
    """See `reduce_in_backward`."""

    def reduce_in_backward(self, reduces: bool) -> None:
        """Choose if the passes from here on reduce this rank's gradients with the other ranks', or
        leave that to a later pass."""
        self.reduces = reduces

    @property
    def completes(self) -> bool:
        """True if gradients are those of the whole batch after the pass that begins."""
        return self.reduces and self.world.completes_passes

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss that was not checked, whose pass begins. Unless it is finite, `reduce` or
        `check` raises NonFiniteGradient on this rank and an error on every other.

        As it stands: see `NonFiniteCheck.losses`.
        """
        assert self.non_finite_check is not None, "a layout without one overrides this"
        self.non_finite_check.losses.note(loss)

    def begin_pass(self, loss: Tensor) -> None:  # noqa: B027 - most layouts reduce by their hooks
        """A backward pass of this model begins, of a loss as it is weighted."""

    def end_pass(self) -> None:  # noqa: B027 - as `begin_pass`
        """End a pass."""

    def backward(self, loss: Tensor, weight: float) -> None:
        """Add this rank's gradients of a loss that is the mean over its own samples.

        `weight` is its share of the global batch times `data_count`.
        """
        loss = loss if weight == 1.0 else loss * weight
        self.begin_pass(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.end_pass()

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        """The forward and backward pass in one, for layouts that interleave them.

        Returns the mean loss over this rank's samples, detached.
        """
        loss = loss_function(self.module(inputs), targets)
        self.backward(loss, weight)
        return loss.detach()

    def meets_in_forward(self, *, is_first_step: bool) -> bool:
        """True if a forward pass with gradients communicates with other ranks, in the first step
        of a generation or in a later one."""
        return True

    def reduce(self) -> None:  # noqa: B027 - most layouts reduce in backward
        """Complete the gradients: from here on those of `parameters` are the global batch's."""

    def check(self) -> None:
        """Raise unless the gradients are finite, on every rank if on any: NonFiniteGradient where
        they are not, GenerationBroken elsewhere. Called after `reduce`; may communicate.

        As it stands: see `NonFiniteCheck.check`.
        """
        if self.non_finite_check is not None:
            self.non_finite_check.check(self.parameters, self.step)

    def overflowed(self) -> bool:
        """True if gradients are not finite, as far as this rank knows; in place of `check`."""
        return bool(name_of_fault(self.parameters))

    def stepped(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Called right after `optimizer.step()`. May communicate."""

    def finish_passes(self) -> None:
        """Called after forward passes of all ranks, outside of a step: raise on all of them if they
        had to compute with the same layers and did not."""
        self.world.exchanges.finish(self.world.group)

    def idle(self) -> Sequence[str]:
        """Trained parameters to which the step's passes have given no gradient on this rank, where
        all ranks have to compute with the same ones. Names."""
        return ()

    @property
    def stepped_by_others(self) -> Collection[str]:
        """Parameters that are whole on this rank, and that the optimizer of another one alone has
        stepped in this generation. Names."""
        return ()

    def synchronised(self) -> bool:
        """True if every gradient of the step went through the layout, so that ranks cannot drift.

        False: the loss came from some other module.
        """
        return True

    def release(self) -> None:  # noqa: B027 - most layouts hold the group by nothing else
        """Release the group at its end, even if `module` is still referenced.

        Quick, raises nothing, may be called twice; no step is taken afterwards.
        """

    def cut(self, reason: str) -> None:  # noqa: B027 - most layouts wait in the group only
        """Make waits of this layout outside of the group raise, after the group was cut. Quick,
        callable from any thread."""

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Groups beside the default one that were made for this layout."""
        return iter(())


LayOut = Callable[[nn.Module, World], Layout]
"""Lay a model over a world. The model's parameters are on the meta device, its buffers are real.
The layout's own parameters are memory with nothing in it; their content comes afterwards."""


def shard_of(tensor: Tensor) -> TensorShard:
    """The chunk that a plain tensor (all of it) or this rank's part of a DTensor is."""
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
    """Give parameters on the meta device memory; buffers, which are real, move to the device.

    What was one parameter or buffer under several names still is.
    """
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
    # Those themselves, which are tied as ever, in the place of empty ones.
    for part, name, buffer in real:
        buffer_table(part)[name] = buffer
    move_buffers(module, device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers to the device; what was one buffer under several names still is."""
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for name, buffer in buffer_table(part).items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                buffer_table(part)[name] = moved[buffer]


def _tied(module: nn.Module) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """List the further places of tied parameters, each with the parameter's first place."""
    first: dict[int, tuple[nn.Module, str]] = {}
    further = []
    for part in module.modules():
        for name, parameter in parameter_table(part).items():
            if parameter is not None:
                place = (part, name)
                if first.setdefault(id(parameter), place) is not place:
                    further.append((place, first[id(parameter)]))
    return further
