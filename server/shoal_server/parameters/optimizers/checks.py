"""Checks of optimizer settings, with the rules of `torch.optim`."""

from collections.abc import Sequence

from shoal_proto.dtypes import MAX_SETTING
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_server.parameters.optimizers.schedules import check_schedule
from shoal_server.parameters.optimizers.staleness import check_policy

KINDS = ("sgd", "adagrad", "adam", "adamw", "outer")


def check_spec(spec: OptimizerSpec, num_groups: int) -> None:
    """Raise UnsupportedOptimizer for an unknown kind; InvalidSpec for settings out of range, or for
    fewer than `num_groups` groups of settings."""
    if spec.kind not in KINDS:
        raise UnsupportedOptimizer(
            "no such optimizer on the parameter server",
            seen=repr(spec.kind),
            expected=", ".join(KINDS),
        )
    check_schedule(spec.schedule)
    check_policy(spec.staleness)
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
    lr = ("lr", hyper.lr, 0.0, MAX_SETTING)
    weight_decay = ("weight_decay", hyper.weight_decay, 0.0, MAX_SETTING)
    eps = ("eps", hyper.eps, 0.0, MAX_SETTING)
    if kind == "outer":
        return (lr, ("momentum", hyper.momentum, 0.0, 1.0))
    if kind == "sgd":
        return (
            lr,
            weight_decay,
            ("momentum", hyper.momentum, 0.0, MAX_SETTING),
            ("dampening", hyper.dampening, -MAX_SETTING, MAX_SETTING),
        )
    if kind == "adagrad":
        return (
            lr,
            weight_decay,
            eps,
            ("lr_decay", hyper.lr_decay, 0.0, MAX_SETTING),
            ("initial_accumulator_value", hyper.initial_accumulator_value, 0.0, MAX_SETTING),
        )
    return (
        lr,
        weight_decay,
        eps,
        ("beta1", hyper.beta1, 0.0, 1.0),
        ("beta2", hyper.beta2, 0.0, 1.0),
    )
