"""Optimizers that treat each element of a parameter by itself, so that parameters can be cut; those
that treat each parameter by itself, so that members can have some of them each; and those that no
strategy runs.

Nothing but its source tells that an optimizer does so. One that takes a norm over all parameters
(LAMB's clipping, the step size of Prodigy and D-Adaptation) gives other weights without an error if
a member has only some of them, and a trial on small tensors may miss at which size or step that
begins. So the classes are listed here whose source was read, and any other has to be vouched for.
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
"""What these update a parameter with comes from that parameter, its gradient and its state."""


def refuse_unless_per_parameter(strategy: str, optimizer: Optimizer, *, vouched: bool) -> None:
    """Raise UnsupportedOptimizer unless it is one of torch's own that treat each parameter by
    itself, or vouched for.

    A class may vouch for itself, by `per_parameter = True` (or `elementwise = True`, which is more)
    in its own body. A subclass is not taken for its parent.
    """
    for each in optimizers_of(optimizer).values():
        said = vars(type(each))
        own = vouched or any(said.get(word) is True for word in ("per_parameter", "elementwise"))
        if not own and type(each) not in PER_PARAMETER:
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
