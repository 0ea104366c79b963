"""Which settings the kernels can run: the same rules as those of `torch.optim`."""

import math
from collections.abc import Sequence

from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec


def check_spec(spec: OptimizerSpec, num_groups: int) -> None:
    """Raise UnsupportedOptimizer or InvalidSpec for what no kernel can run."""
    if spec.kind not in ("sgd", "adam", "adamw"):
        raise UnsupportedOptimizer(
            "no such optimizer on the parameter server",
            seen=repr(spec.kind),
            expected="sgd, adam or adamw",
        )
    if len(spec.groups) < num_groups:
        raise InvalidSpec(
            "each parameter group needs its hyper-parameters",
            seen=f"{len(spec.groups)} groups",
            expected=f"at least {num_groups}",
        )
    for index, hyper in enumerate(spec.groups):
        for name, value, low, high in _ranges(spec.kind, hyper):
            if not low <= value < high:
                raise InvalidSpec(
                    f"{name} of parameter group {index} is out of range",
                    seen=f"{value:g}",
                    expected=f"{low:g} <= {name} < {high:g}",
                )
        if hyper.nesterov and (hyper.momentum == 0.0 or hyper.dampening != 0.0):
            raise InvalidSpec(
                f"nesterov of parameter group {index} contradicts its other settings",
                seen=f"momentum {hyper.momentum:g} and dampening {hyper.dampening:g}",
                expected="a momentum above 0 and no dampening",
            )


def _ranges(kind: str, hyper: HyperParameters) -> Sequence[tuple[str, float, float, float]]:
    shared = (
        ("lr", hyper.lr, 0.0, math.inf),
        ("weight_decay", hyper.weight_decay, 0.0, math.inf),
    )
    if kind == "sgd":
        return (
            *shared,
            ("momentum", hyper.momentum, 0.0, math.inf),
            ("dampening", hyper.dampening, -math.inf, math.inf),
        )
    return (
        *shared,
        ("beta1", hyper.beta1, 0.0, 1.0),
        ("beta2", hyper.beta2, 0.0, 1.0),
        ("eps", hyper.eps, 0.0, math.inf),
    )
