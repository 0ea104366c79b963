"""Kinds of optimizers: those that update each element separately (parameters can be sharded), those
that update each parameter separately (each member can step some of them), and LBFGS.

Only an optimizer's source shows its kind: the sources of the classes listed here were read, and
users may vouch for other classes.
"""

from torch import optim
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal_proto.errors import UnsupportedOptimizer

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)

PER_PARAMETER: frozenset[type[Optimizer]] = ELEMENTWISE | {optim.Adafactor, optim.Muon}
"""Optimizers that update a parameter by its own value, gradient and state only."""


def refuse_unless_per_parameter(strategy: str, optimizer: Optimizer, *, vouched: bool) -> None:
    """Raise UnsupportedOptimizer unless the optimizer is one of torch's own that update each
    parameter separately, or is vouched for: as an argument, or by `per_parameter = True` or
    `elementwise = True` in its class' own body."""
    for each in optimizers_of(optimizer).values():
        marks = vars(type(each))
        fits = vouched or any(marks.get(word) is True for word in ("per_parameter", "elementwise"))
        if not fits and type(each) not in PER_PARAMETER:
            raise _may_need_all(strategy, each)


def _may_need_all(strategy: str, optimizer: Optimizer) -> UnsupportedOptimizer:
    kind = type(optimizer)
    return UnsupportedOptimizer(
        f"under {strategy} a member steps some of the parameters, and {kind.__name__} may need all"
        " of them at once",
        seen=f"{kind.__module__}.{kind.__qualname__}",
        expected="one of torch's " + ", ".join(sorted(each.__name__ for each in PER_PARAMETER)),
        fix="If it updates each parameter by that parameter's own gradient and state alone (a norm"
        " of one parameter is fine, one over all parameters is not), say so with"
        " per_parameter_optimizer=True; otherwise use strategy 'ddp', under which every member has"
        " all of them.",
    )


def refuse_unless_elementwise(strategy: str, optimizer: Optimizer, vouched: bool) -> None:
    """Raise UnsupportedOptimizer unless the optimizer is one of torch's elementwise ones, or is
    vouched for: as an argument, or by `elementwise = True` in its class' own body."""
    for each in optimizers_of(optimizer).values():
        fits = vouched or vars(type(each)).get("elementwise") is True
        if not fits and type(each) not in ELEMENTWISE:
            raise _may_need_wholes(strategy, each)


def _may_need_wholes(strategy: str, optimizer: Optimizer) -> UnsupportedOptimizer:
    return UnsupportedOptimizer(
        f"{strategy} cuts parameters, and {type(optimizer).__name__} may need them whole",
        seen=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        expected="one of torch's " + ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE)),
        fix="If it treats each element separately, say so with elementwise_optimizer=True; "
        "otherwise use strategy 'ddp', which leaves parameters whole.",
    )


def refuse_further_state(name: str, optimizer: Optimizer) -> None:
    """Raise UnsupportedOptimizer if the optimizer's state_dict has more than the state of
    parameters and groups: a member that joins would not get it."""
    for each in optimizers_of(optimizer).values():
        if type(each).state_dict is Optimizer.state_dict:
            continue
        other_keys = each.state_dict().keys() - {"state", "param_groups"}
        if other_keys:
            raise UnsupportedOptimizer(
                f"{name} cannot hand over all of the state of {type(each).__name__}",
                seen=f"in its state_dict: {', '.join(sorted(map(str, other_keys)))}",
                expected="the state of parameters, and settings of groups",
                fix="Keep it in optimizer.state[parameter] or in the groups.",
            )


def refuse_lbfgs(name: str, optimizer: Optimizer) -> None:
    """Raise UnsupportedOptimizer for LBFGS, which computes the loss several times a step."""
    if any(isinstance(each, optim.LBFGS) for each in optimizers_of(optimizer).values()):
        raise UnsupportedOptimizer(
            f"{name} cannot run LBFGS",
            seen="an optimizer that calls the loss several times a step",
            expected="one that uses each gradient once, such as SGD or AdamW",
        )
