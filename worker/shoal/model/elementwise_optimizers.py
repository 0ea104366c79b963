"""Optimizers that treat each element of a parameter by itself, so that parameters can be cut."""

from torch import optim
from torch.optim import Optimizer

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
    vouched = vouched or vars(type(optimizer)).get("elementwise") is True
    if vouched or type(optimizer) in ELEMENTWISE:
        return
    raise UnsupportedOptimizer(
        f"{strategy} cuts parameters, and {type(optimizer).__name__} may need them whole",
        seen=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        expected="one of torch's " + ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE)),
        fix="If it treats each element by itself, say so with elementwise_optimizer=True;"
        " else use strategy 'ddp', which leaves parameters whole.",
    )
