"""Parameters that an optimizer of the script's own may not step on while a session trains.

The first are those that a session's losses go through, and that are not the distributed model's.
Nobody brings their gradients together: each member has those of its own samples. A loss function
with weights of its own (a margin, a centre of each class), stepped by an optimizer that the script
keeps for itself, would become another one on each member, and the model be trained by as many
losses as there are members. A teacher's gradients, which nobody steps on, do no harm.

The others are the distributed model's: a script with two optimizers, say one for matrices and one
for all else, may have distributed one of them only. Where the model is cut or copied, the other has
the parameters that it was made with, which nobody trains any more, and does nothing. Where it is
the script's own, the other trains it, and its state is no part of the job's: a member that joins
has none, and of a step that is taken back it stays.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_proto.errors import InvalidSpec

References = dict[int, weakref.ref[Tensor]]
"""To parameters, by their identity."""


def references(parameters: Iterable[Tensor]) -> References:
    """To these, without keeping any of them."""
    return {id(each): weakref.ref(each) for each in parameters}


class OtherParameters:
    """Those that the losses of a session's first step go through, and the model's."""

    def __init__(
        self,
        own: Callable[[], Iterable[Tensor]],
        given: References,
        optimizers: Sequence[Optimizer],
        commits: Callable[[], bool],
    ) -> None:
        """`own`: the parameters of the distributed model, in its present generation; `given`: those
        that the script's model had, which may be others; `optimizers` are those that were
        distributed with it, within whose steps, while the session `commits`, others may step."""
        self._own = own
        self._given = given
        self._optimizers = optimizers
        self._commits = commits
        self._others: References = {}
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def look(self, loss: Tensor) -> None:
        """A backward pass of this loss begins."""
        own = {id(each) for each in self._own()}
        leaves = (each for each in _leaves(loss) if isinstance(each, nn.Parameter))
        self._others |= references(each for each in leaves if id(each) not in own)

    def release(self) -> None:
        """The session is over. May be called twice."""
        self._hook.remove()
        self._others.clear()
        self._given = {}

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer in self._optimizers:
            return
        own = {} if self._commits() else self._given | references(self._own())
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if _has(self._others, parameter):
                    raise _apart(optimizer, index, parameter)
                if _has(own, parameter):
                    raise _not_distributed(optimizer, index, parameter)


def _has(refs: References, parameter: Tensor) -> bool:
    # One that is gone may have left its identity to another.
    known = refs.get(id(parameter))
    return known is not None and known() is parameter


def nodes_of(loss: Tensor) -> set[Node]:
    """All that a backward pass goes through."""
    return nodes_from([loss.grad_fn])


def nodes_from(nodes: Iterable[Node | None]) -> set[Node]:
    """These, and all that a backward pass goes through behind them."""
    found: set[Node] = set()
    ahead = list(nodes)
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


def _not_distributed(optimizer: Optimizer, group: int, parameter: Tensor) -> InvalidSpec:
    return InvalidSpec(
        "an optimizer that was not distributed steps on parameters of the distributed model",
        seen=f"{type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} in"
        f" group {group}",
        expected="all optimizers of the model given to session.distribute, and no step() of theirs"
        " in the loop: what another one does is no part of the job, and where a model is cut or"
        " copied, it trains nothing",
        fix="Distribute both, in a list: session.distribute([model], [first, second]), see"
        " docs/strategies.md, 'Several models and optimizers'.",
    )
