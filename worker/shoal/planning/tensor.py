"""Figures of the ranks of a tensor-parallel group, from shapes alone."""

from collections.abc import Mapping

import torch
from torch import nn

from shoal.layouts.tensor.layer_group import TensorGroup
from shoal.layouts.tensor.layout import make_partial
from shoal.layouts.tensor.plan import WHOLE, TensorPlan, part_sizes
from shoal.layouts.tensor.sequence import spread_positions, summed_parameters
from shoal.planning.figures import UPDATE, Collective, GroupFigures, Plan, PlanInput, RankFigures
from shoal.planning.meta_device import on_meta, to_meta
from shoal.planning.rehearsal import RehearsalGroup, RehearsedPass
from shoal.torch_private.modules import parameter_table

NOTE = "without inputs, activations and their gradients, which the ranks exchange, are not counted"


def tensor_figures(subject: PlanInput, tensor_plan: TensorPlan) -> Plan:
    """Compute the plan. Gradients of replicated parameters are whole on every rank."""
    firsts = [first_equal_rank(tensor_plan, rank) for rank in range(subject.world_size)]
    ranks = {first: _rank(subject, tensor_plan, first) for first in set(firsts)}
    return Plan(
        strategy="tensor",
        groups=tensor_groups(tensor_plan),
        ranks=tuple(ranks[first] for first in firsts),
        notes=() if subject.inputs is not None else (NOTE,),
    )


def first_equal_rank(tensor_plan: TensorPlan, rank: int) -> int:
    """Return the first rank that holds parts of the same shapes as this one."""

    def shapes(of: int) -> list[tuple[int, ...]]:
        parts = [part for entry in tensor_plan.entries for part in entry.parts.values()]
        return [part.shape_on(of, tensor_plan.degree) for part in parts]

    return next(other for other in range(rank + 1) if shapes(other) == shapes(rank))


def tensor_groups(tensor_plan: TensorPlan) -> tuple[GroupFigures, ...]:
    """Return a group for each module with parameters, with its style in the title."""
    return tuple(
        GroupFigures(
            title=f"{entry.module or '(the model)'} ({entry.style})",
            num_parameters=len(entry.parts),
            num_bytes=entry.bytes_on(0, 1),
        )
        for entry in tensor_plan.entries
        if entry.parts
    )


def non_finite_message(world_size: int) -> Collective:
    """Return the all-reduce by which all ranks learn if the step's gradients are finite."""
    num_bytes = world_size * torch.float32.itemsize
    return Collective(kind="all_reduce", when=UPDATE, calls=1, num_bytes=num_bytes)


def split_alone(module: nn.Module, plan: TensorPlan, ranks: TensorGroup) -> frozenset[int]:
    """Reduce a module on the meta device to this rank's part, without peers. Returns the ids of the
    new parameters, each a part of a whole one."""
    # Keyed by the id of the whole parameter, which the value keeps alive.
    cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for entry in plan.entries:
        if entry.style == WHOLE:
            continue
        owner = module.get_submodule(entry.module)
        for path, dim in make_partial(owner, entry, ranks).items():
            path_of_owner, _, key = path.rpartition(".")
            held = parameter_table(owner.get_submodule(path_of_owner))
            whole = held[key]
            if whole is not None:
                cut.setdefault(id(whole), (whole, _part(whole, dim, ranks)))
                held[key] = cut[id(whole)][1]
    return frozenset(id(part) for _, part in cut.values())


def _part(whole: nn.Parameter, dim: int, ranks: TensorGroup) -> nn.Parameter:
    shape = list(whole.shape)
    shape[dim] = part_sizes(shape[dim], ranks.size)[ranks.rank]
    empty = torch.empty(shape, dtype=whole.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=whole.requires_grad)


def _rank(subject: PlanInput, tensor_plan: TensorPlan, rank: int) -> RankFigures:
    shapes, held, gradients = {}, 0, 0
    aligned: dict[torch.dtype, int] = {}
    for entry in tensor_plan.entries:
        for part_name, part in entry.parts.items():
            name = f"{entry.module}.{part_name}" if entry.module else part_name
            shapes[name] = part.shape_on(rank, subject.world_size)
            num_bytes = part.bytes_on(rank, subject.world_size)
            held += num_bytes
            if subject.parameters[name].requires_grad:
                gradients += num_bytes
                if part.dim is None:
                    dtype = subject.parameters[name].dtype
                    aligned[dtype] = aligned.get(dtype, 0) + num_bytes
    return RankFigures(
        parameters=held,
        parameters_peak=held,
        gradients=gradients,
        gradients_peak=gradients,
        optimizer=subject.state_bytes(shapes),
        collectives=_collectives(subject, tensor_plan, rank, aligned),
    )


def _collectives(
    subject: PlanInput, tensor_plan: TensorPlan, rank: int, aligned: Mapping[torch.dtype, int]
) -> tuple[Collective, ...]:
    if subject.world_size == 1:
        return ()
    moved: tuple[Collective, ...] = ()
    if subject.inputs is not None:
        group = RehearsalGroup(rank, subject.world_size)
        model = on_meta(subject.model)
        ranks = TensorGroup(group, torch.device("meta"))
        split_alone(model, tensor_plan, ranks)
        spread_positions(model, tensor_plan.sequence, ranks)
        inputs = to_meta(subject.inputs)
        moved = RehearsedPass(group, lambda: model(inputs)).collectives()
    # The first rank broadcasts gradients of whole parameters, one call a dtype.
    copied = Collective(
        kind="broadcast", when=UPDATE, calls=len(aligned), num_bytes=sum(aligned.values())
    )
    summed = _summed(subject, tensor_plan)
    # Without sequence parallelism, members report non-finite gradients in their votes.
    sums = summed_parameters(subject.model, tensor_plan.sequence)
    flag = (non_finite_message(subject.world_size),) if sums else ()
    return (*moved, *summed, copied, *flag) if aligned else (*moved, *summed, *flag)


def _summed(subject: PlanInput, tensor_plan: TensorPlan) -> tuple[Collective, ...]:
    names = summed_parameters(subject.model, tensor_plan.sequence)
    trained = [p for name, p in subject.parameters.items() if name in names and p.requires_grad]
    if not trained:
        return ()
    calls = len({parameter.dtype for parameter in trained})
    num_bytes = sum(parameter.nbytes for parameter in trained)
    return (Collective(kind="all_reduce", when=UPDATE, calls=calls, num_bytes=num_bytes),)
