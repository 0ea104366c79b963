"""What `TensorLayout` holds, from its plan; what it moves depends on the batch and is left out."""

from shoal.layouts.tensor_plan import TensorPlan
from shoal.planning.figures import GroupFigures, Plan, RankFigures, Subject

NOTE = "activations and their gradients, which the ranks exchange in each pair, are not counted"


def tensor_figures(subject: Subject, tensor_plan: TensorPlan) -> Plan:
    """Memory of each rank. Gradients of replicated parameters are whole on every rank."""
    groups = tuple(
        GroupFigures(
            title=f"{entry.module or '(the model)'} ({entry.style})",
            num_parameters=len(entry.parts),
            num_bytes=entry.bytes_on(0, 1),
        )
        for entry in tensor_plan.entries
        if entry.parts
    )
    ranks = tuple(_rank(subject, tensor_plan, rank) for rank in range(subject.world_size))
    return Plan(strategy="tensor", groups=groups, ranks=ranks, notes=(NOTE,))


def _rank(subject: Subject, tensor_plan: TensorPlan, rank: int) -> RankFigures:
    shapes, held, gradients = {}, 0, 0
    for entry in tensor_plan.entries:
        for part_name, part in entry.parts.items():
            name = f"{entry.module}.{part_name}" if entry.module else part_name
            shapes[name] = part.shape_on(rank, subject.world_size)
            num_bytes = part.bytes_on(rank, subject.world_size)
            held += num_bytes
            gradients += num_bytes * subject.parameters[name].requires_grad
    return RankFigures(
        parameters=held,
        parameters_peak=held,
        gradients=gradients,
        gradients_peak=gradients,
        optimizer=subject.state_bytes(shapes),
        collectives=(),
    )


__all__ = ["tensor_figures"]
