"""Layout that shards parameters, gradients and optimizer state by rows, on torch's fully_shard:
over all ranks, or over groups of ranks that each hold a copy (HSDP)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from shoal.backends.abortable.communicators import add_subgroups
from shoal.backends.abortable.waiter import all_reduce
from shoal.backends.process_group.transports import is_gloo
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.layouts.base import Layout, World, move_buffers
from shoal.layouts.buffers import RunningBuffers
from shoal.layouts.gradients import name_of_fault
from shoal.layouts.sharded.all_gather import SharedMemoryAllGather
from shoal.layouts.sharded.group_passes import GroupPasses
from shoal.layouts.sharded.grouping import group_modules
from shoal.layouts.sharded.layer_order import LayerOrder, RecordedOrder
from shoal.layouts.sharded.nan_propagating_reduce_scatter import (
    NanPropagatingReduceScatter,
    own_fault,
)
from shoal.layouts.sharded.shared_slots import SharedSlots
from shoal.model.gradients import refuse_second_derivatives
from shoal.model.losses import PendingLosses
from shoal.model.not_finite import gradient_not_finite, others_not_finite
from shoal.state.shards import MODEL
from shoal.torch_private.c10d import takes_batches, timeout_of
from shoal.torch_private.dtensor import forget_groups
from shoal.torch_private.fsdp import (
    REDUCES_AS_STORED,
    fsdp_parameters,
    give_memory,
    has_run,
    has_unreduced_gradient,
    is_unmodified,
    parameters_of,
    reset_pass,
)
from shoal.torch_private.modules import parameter_table
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields

_IN_PART = "NaN or Inf in this member's part"


@dataclass(frozen=True, kw_only=True)
class ShardedOptions:
    """Options for gathering and computing a sharded model."""

    free_after_forward: bool = True
    """True: gathered parameters are freed after forward and gathered again for backward (ZeRO-3).
    False: they stay until their gradients are reduced (ZeRO-2)."""
    min_group_bytes: int | None = None
    """See `group_modules`."""
    param_dtype: torch.dtype | None = None
    """Dtype of layers' computations and of all-gathers; None: the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks; None: see `reduces_in`."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state on the host between passes, and step there. No
    effect on a model that computes on a CPU."""
    shard: int | None = None
    """Minimum number of ranks over which a copy of the model is sharded; None: all. See
    `ranks_of_copy`."""

    def __post_init__(self) -> None:
        convert_fields(self, indices=("min_group_bytes",))

    @property
    def reduces_as_stored(self) -> bool:
        """True if gradients are summed in the stored dtype, not in `param_dtype`, by default of
        this torch: all members need such a release."""
        return REDUCES_AS_STORED and self.param_dtype is not None and self.reduce_dtype is None

    def reduces_in(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in which gradients of parameters stored in this dtype are summed."""
        computed = None if self.reduces_as_stored else self.param_dtype
        return self.reduce_dtype or computed or stored


def ranks_of_copy(world_size: int, shard: int | None) -> int:
    """Number of ranks that share a copy of the model: the smallest divisor of `world_size` that is
    at least `shard`; all if `shard` is None or larger."""
    return next(
        n
        for n in range(min(shard or world_size, world_size), world_size + 1)
        if world_size % n == 0
    )


class ShardedLayout(Layout):
    """Layout in which each rank holds some rows of every parameter. The last ranks hold nothing of
    a parameter with fewer rows than ranks.

    With several copies of the model, consecutive ranks share a copy. Ranks with the same rows
    average their gradients.
    """

    def __init__(self, model: nn.Module, world: World, options: ShardedOptions) -> None:
        """Shard the model, in place. Collective. Raises InvalidSpec if `group_modules` does."""
        self.world = world
        self.data_index, self.data_count = world.rank, world.world_size
        self._groups: dict[str, dist.ProcessGroup] = {}
        """Groups of this rank if there are several copies: "rows", the ranks of its copy, and
        "copies", the ranks with the same rows."""
        self._mesh = self._rows_and_copies(options)
        self._passes: list[GroupPasses] = []
        self._reductions: dict[Any, NanPropagatingReduceScatter] = {}
        self._reduced_with: dict[str, Sequence[str]] = {}
        self._losses = PendingLosses()
        self._gatherings: list[SharedMemoryAllGather] = []
        _lay_rows_in_order(model)
        self._shard(model, options)
        self._slots = self._share(options)
        self._check_copies()
        world.exchanges.is_compared = world.exchanges.is_compared or bool(self._groups)
        for part in fsdp_parameters(model):
            give_memory(part, torch.device("cpu") if options.cpu_offload else world.device)
        move_buffers(model, world.device)
        refuse_second_derivatives(model)
        self.module = model
        self._parameters = dict(model.named_parameters())
        self._buffers = RunningBuffers(model)
        self.fsdp_parameters = list(fsdp_parameters(model))

    def _rows_and_copies(self, options: ShardedOptions) -> DeviceMesh:
        """Return the mesh of the ranks that share this rank's copy; sets `_groups`, `_copy` and
        `_num_copies`. Collective."""
        world, device = self.world, self.world.device.type
        num_rows = ranks_of_copy(world.world_size, options.shard)
        self._copy, self._num_copies = world.rank // num_rows, world.world_size // num_rows
        if self._num_copies == 1:
            own = world.axis("data")
            return DeviceMesh.from_group(world.group, device, mesh_dim_names=(own,))
        names = (world.axis("copy"), world.axis("data"))
        mesh = init_device_mesh(device, (self._num_copies, num_rows), mesh_dim_names=names)
        self._groups.update(zip(("copies", "rows"), map(mesh.get_group, names), strict=True))
        add_subgroups(self.groups(), world.group, world.device)
        return mesh[names[1]]

    def groups(self) -> Iterator[dist.ProcessGroup]:
        return iter(self._groups.values())

    def _shard(self, model: nn.Module, options: ShardedOptions) -> None:
        settings: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": _policy(options, None),
            "reshard_after_forward": options.free_after_forward,
            "offload_policy": _offload(options, self.world.device),
        }
        grouping = group_modules(model, options.min_group_bytes)
        for group in grouping.groups:
            modules = [model.get_submodule(path) for path in group.modules]
            fully_shard(modules if len(modules) > 1 else modules[0], **settings)
            self._set_reduction(modules[0], group.parameters)
            if len(modules) > 1:
                self._passes.append(GroupPasses(modules))
        # The rest stays gathered: backward needs it right after forward.
        settings["reshard_after_forward"] = False
        first = next(model.parameters())
        fully_shard(model, **{**settings, "mp_policy": _policy(options, first.dtype)})
        self._set_reduction(model, grouping.rest.parameters)

    def _share(self, options: ShardedOptions) -> SharedSlots | None:
        """Choose how ranks gather and sum. Returns the slots in shared memory, or None.
        Collective."""
        device, rows = self.world.device, self._groups.get("rows", self.world.group)
        if takes_batches(rows, device):
            self._note_order()
            return None
        if rows.size() == 1 or device.type != "cpu" or not is_gloo(rows):
            return None
        heads = list(self._reductions)
        slots = SharedSlots.open(
            rows,
            max(_whole_bytes(head, rows.size(), options.param_dtype) for head in heads),
            max(_whole_bytes(head, rows.size(), options.reduce_dtype) for head in heads),
            timeout_of(rows, device),
            self.world.kept_regions,
        )
        names = [reduction.parameter for reduction in self._reductions.values()]
        order = LayerOrder(rows, names, self._report_refusal) if slots is None else None
        if slots is not None:
            slots.names, slots.report_refusal = names, self._report_refusal
            slots.ranks = dist.get_process_group_ranks(rows)
        for number, head in enumerate(heads):
            gathering = SharedMemoryAllGather(slots, number)
            gathering.order = order
            head.set_custom_all_gather(gathering)
            self._gatherings.append(gathering)
        for reduction in self._reductions.values():
            reduction.slots = slots
            if order is not None:
                reduction.orders.append(order)
        return slots

    def _note_order(self) -> None:
        """Record all-gathers and sums on a device, to detect ranks that skip different layers."""
        exchanges = self.world.exchanges
        if not exchanges.peers:
            exchanges.set_peers(range(self.world.world_size))
        order = RecordedOrder(exchanges, [each.parameter for each in self._reductions.values()])
        for number, (head, reduction) in enumerate(self._reductions.items()):
            gathering = SharedMemoryAllGather(None, number)
            gathering.order = order
            head.set_custom_all_gather(gathering)
            self._gatherings.append(gathering)
            reduction.orders.append(order)

    def _check_copies(self) -> None:
        copies = self._groups.get("copies")
        if copies is None or self.world.device.type != "cpu" or not is_gloo(copies):
            return
        names = [each.parameter for each in self._reductions.values()]
        order = LayerOrder(copies, names, self._report_refusal)
        for reduction in self._reductions.values():
            reduction.orders.append(order)

    def _report_refusal(self, refusal: InvalidSpec) -> None:
        if self._groups:
            self.world.exchanges.report_refusal(refusal)

    def _set_reduction(self, module: Any, names: Sequence[str]) -> None:
        self._reduced_with.update(dict.fromkeys(names, names))
        if names:
            reduction = NanPropagatingReduceScatter(names[0])
            reduction.number = len(self._reductions)
            reduction.losses = self._losses
            reduction.copies = self._groups.get("copies")
            trained = (each for each in parameters_of(module) if each.sharded_param.requires_grad)
            reduction.blind = not all(each.sharded_size.numel() for each in trained)
            self._reductions[module] = reduction
            module.set_custom_reduce_scatter(reduction)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def is_counted_here(self, name: str) -> bool:
        return not self._copy and super().is_counted_here(name)

    def replicas(self, name: str) -> Sequence[int]:
        if self._num_copies == 1 or name not in self._parameters:
            return super().replicas(name)
        num_rows = self.world.world_size // self._num_copies
        return range(self.world.rank % num_rows, self.world.world_size, num_rows)

    def is_lost_with_rank(self, name: str) -> bool:
        """True, except for buffers and if there are several copies of the model."""
        is_buffer = name.startswith(MODEL) and name.removeprefix(MODEL) not in self._parameters
        return self._num_copies == 1 and not is_buffer

    @property
    def shared_memory(self) -> SharedMemory | None:
        slots = self._slots
        return slots.memory if slots is not None and self._num_copies == 1 else None

    def watch(self, ours: Callable[[], bool]) -> None:
        for reduction in self._reductions.values():
            reduction.ours = ours
        # Gradients of passes through the model reach gathered parameters, never the sharded ones.
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                refuse = partial(_refuse_to_pass_by, ours, name)
                parameter.register_hook(refuse)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        for passes in self._passes:
            passes.begin()
        self._losses.begin()
        for reduction in self._reductions.values():
            reduction.forget()
        self._free_gathered()

    def note_loss(self, loss: Tensor) -> None:
        self._losses.note(loss)

    def reduce_in_backward(self, reduces: bool) -> None:
        super().reduce_in_backward(reduces)
        root: Any = self.module
        root.set_requires_gradient_sync(reduces)

    def check(self) -> None:
        """Raise on all ranks if a rank's own gradients are not finite: NonFiniteGradient on that
        rank, GenerationBroken on the others. If only a sum over ranks is not finite, ranks that see
        it raise NonFiniteGradient."""
        fault = name_of_fault(self._parameters) or self._given_fault()
        if not fault:
            # A loss that is not finite makes gradients NaN, unless nothing was reduced.
            self._losses.check(self.step)
            return
        if not self._was_spread(fault):
            raise gradient_not_finite(fault, self.step, seen=_IN_PART)
        at_fault = torch.zeros(self.world.world_size, device=self.world.device)
        own = own_fault(self._reductions.values())
        at_fault[self.world.rank] = bool(own) or not self._losses.are_finite()
        all_reduce(at_fault, self.world.group)
        self._losses.check(self.step)
        if not at_fault.any() or at_fault[self.world.rank]:
            raise gradient_not_finite(fault, self.step, seen=_IN_PART)
        raise others_not_finite(at_fault.tolist(), self.step)

    def overflowed(self) -> bool:
        own = any(each.own for each in self._reductions.values())
        return own or super().overflowed() or bool(self._given_fault())

    def _given_fault(self) -> str:
        reductions = self._reductions.values()
        looks = [(each.parameter, look) for each in reductions for look in each.given_finite]
        if not looks:
            return ""
        results = torch.stack([look for _, look in looks]).tolist()
        pairs = zip(looks, results, strict=True)
        return next((name for (name, _), is_finite in pairs if not is_finite), "")

    def _was_spread(self, name: str) -> bool:
        """True if all ranks have received the fault as NaN in all gradients that were reduced
        together. An overflow of the sum has another result: see `add_up` and `average`; NCCL's
        rings add one rank after the other."""
        gradients: Any = (self._parameters[each].grad for each in self._reduced_with[name])
        return all(bool(g.to_local().isnan().all()) for g in gradients if g is not None)

    def share_buffers(self) -> None:
        self._buffers.broadcast_buffers(self.world.group)

    def stepped(self) -> None:
        self._free_gathered()

    def _free_gathered(self) -> None:
        """Free parameters left gathered by evaluation: the next pass would compute with their old
        values."""
        root: Any = self.module
        if has_run(root):
            reset_pass(root, self.fsdp_parameters)

    def finish_passes(self) -> None:
        super().finish_passes()
        if self._slots is not None:
            self._slots.finish()
        for gathering in self._gatherings[:1]:
            gathering.finish()

    def names_without_gradient(self) -> Sequence[str]:
        return [
            n for n, each in self._parameters.items() if each.requires_grad and each.grad is None
        ]

    def reduce(self) -> None:
        """Raise InvalidSpec if a pass has written to gathered weights: that copy is freed after the
        pass."""
        changed = [part for part in self.fsdp_parameters if not is_unmodified(part)]
        if changed:
            names = {id(parameter): name for name, parameter in self._parameters.items()}
            written = sorted(names[id(part.sharded_param)] for part in changed)
            raise InvalidSpec(
                f"a forward pass has written to weights, in step {self.step} or before it",
                seen=f"writes to {', '.join(written[:5])}, where a pass has only a temporary copy",
                expected="writes between passes, when a member has its own part of the weights",
                fix="Move or clip weights outside of forward(); or use"
                " strategy 'ddp' or 'zero1', whose members have the whole weights.",
            )

    def synchronised(self) -> bool:
        """True if there are gradients and all of them are reduced."""
        reduced = any(parameter.grad is not None for parameter in self._parameters.values())
        return reduced and not any(map(has_unreduced_gradient, self.fsdp_parameters))

    def cut(self, reason: str) -> None:
        slots = self._slots
        if slots is not None:
            slots.cut(reason)

    def release(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        for gathering in self._gatherings:
            gathering.release()
        for reduction in self._reductions.values():
            reduction.copies = reduction.slots = None
            reduction.orders.clear()
        self._groups.clear()
        for part in self.fsdp_parameters:
            part.mesh_info.shard_process_group = None
        forget_groups(self._mesh)


def _lay_rows_in_order(model: nn.Module) -> None:
    """Make parameters, on the meta device, contiguous: fully_shard cuts rows from contiguous
    memory."""
    contiguous: dict[int, nn.Parameter] = {}
    for part in model.modules():
        table = parameter_table(part)
        for name, parameter in table.items():
            if parameter is not None and not parameter.is_contiguous():
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                own = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                table[name] = contiguous.setdefault(id(parameter), own)


def _whole_bytes(module: nn.Module, world_size: int, dtype: torch.dtype | None) -> int:
    return sum(
        world_size
        * part.padded_sharded_param_size.numel()
        * max(part.sharded_param.element_size(), dtype.itemsize if dtype else 0)
        for part in parameters_of(module)
    )


def _offload(options: ShardedOptions, device: torch.device) -> OffloadPolicy:
    # Pinned memory lets a GPU copy while it computes; torch cannot pin memory without a GPU.
    pins = device.type != "cpu"
    return CPUOffloadPolicy(pin_memory=pins) if options.cpu_offload else OffloadPolicy()


def _policy(options: ShardedOptions, output_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if options.param_dtype is None:
        return MixedPrecisionPolicy(reduce_dtype=options.reduce_dtype)
    return MixedPrecisionPolicy(
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        output_dtype=output_dtype,
    )


def _refuse_to_pass_by(ours: Callable[[], bool], name: str, _: Tensor) -> None:
    """Raise if a gradient of the session's own pass (`ours()`) reaches this rank's part of a
    parameter without a reduction."""
    if ours():
        raise InvalidSpec(
            "a loss computed with parameters that are sharded over the members",
            seen=f"{name} by itself, outside of a forward pass of the model",
            expected="a loss of what the model's forward() returns",
            fix="Compute terms of the loss from parameters in forward(), or use weight_decay;"
            " strategies 'ddp' and 'zero1' leave parameters whole.",
        )
