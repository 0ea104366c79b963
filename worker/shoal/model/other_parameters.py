"""Parameters that a session's losses go through, and that are not the distributed model's.

Nobody brings their gradients together: each member has those of its own samples. A loss function
with weights of its own (a margin, a centre of each class), stepped by an optimizer that the script
keeps for itself, would become another one on each member, and the model be trained by as many
losses as there are members. A teacher's gradients, which nobody steps on, do no harm.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_proto.errors import InvalidSpec


class OtherParameters:
    """Those that the losses of a session's first step go through."""

    def __init__(
        self, own: Callable[[], Iterable[Tensor]], optimizers: Sequence[Optimizer]
    ) -> None:
        """`own`: the parameters of the distributed model, in its present generation; `optimizers`
        are those that were distributed with it."""
        self._own = own
        self._optimizers = optimizers
        self._others: dict[int, weakref.ref[Tensor]] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def look(self, loss: Tensor) -> None:
        """A backward pass of this loss begins."""
        own = {id(each) for each in self._own()}
        for leaf in _leaves(loss):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                self._others[id(leaf)] = weakref.ref(leaf)

    def release(self) -> None:
        """The session is over. May be called twice."""
        self._hook.remove()
        self._others.clear()

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._others or any(optimizer is each for each in self._optimizers):
            return
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                known = self._others.get(id(parameter), _nothing)()
                if known is not None and known is parameter:
                    raise _apart(optimizer, index, known)


def _nothing() -> None:
    """What is left of a parameter that was never seen."""


def nodes_of(loss: Tensor) -> set[Node]:
    """All that a backward pass goes through."""
    found: set[Node] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [before for before, _ in node.next_functions]
    return found


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """What gradients are added up in."""
    for node in nodes_of(loss):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def _apart(optimizer: Optimizer, group: int, parameter: Tensor) -> InvalidSpec:
    return InvalidSpec(
        "an optimizer of the script's own steps on gradients that each member has by itself",
        seen=f"{type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} in"
        f" group {group}, which session.backward went through and the distributed model lacks",
        expected="all that a loss trains distributed: each member would train another copy",
        fix="Distribute both, in a list with their optimizers (docs/strategies.md, 'Several models"
        " and optimizers'), or one module that holds all parameters.",
    )
