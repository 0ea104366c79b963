"""Optimizers that treat each element of a parameter by itself, so that parameters can be cut, and
those that no strategy runs."""

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


def refuse_unless_elementwise(strategy: str, optimizer: Optimizer, vouched: bool) -> None:
    """Raise UnsupportedOptimizer unless it is one of torch's elementwise ones, or vouched for.

    A subclass is not taken for its parent: it may look at the whole of a parameter. A class may
    vouch for itself, by `elementwise = True` in its own body.
    """
    for each in optimizers_of(optimizer).values():
        own = vouched or vars(type(each)).get("elementwise") is True
        if not own and type(each) not in ELEMENTWISE:
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
    """Raise UnsupportedOptimizer for one that keeps a state of its own beside that of parameters
    and groups, as its state_dict says: a member that joins would not get it."""
    for each in optimizers_of(optimizer).values():
        if type(each).state_dict is Optimizer.state_dict:
            continue
        further = each.state_dict().keys() - {"state", "param_groups"}
        if further:
            raise UnsupportedOptimizer(
                f"{name} cannot hand over all of the state of {type(each).__name__}",
                seen=f"in its state_dict: {', '.join(sorted(map(str, further)))}",
                expected="the state of parameters, and settings of groups",
                fix="Keep it in optimizer.state[parameter] or in the groups.",
            )


def refuse_lbfgs(name: str, optimizer: Optimizer) -> None:
    """Raise UnsupportedOptimizer for one that computes the loss several times a step."""
    if any(isinstance(each, optim.LBFGS) for each in optimizers_of(optimizer).values()):
        raise UnsupportedOptimizer(
            f"{name} cannot run LBFGS",
            seen="an optimizer that calls the loss several times a step",
            expected="one that uses each gradient once, such as SGD or AdamW",
        )
