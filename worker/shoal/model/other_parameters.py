"""Parameters that a script must not train by itself, and that it must not use any more.

Gradients of parameters outside the model, such as a loss function's, are not reduced. A layout
trains new objects in each generation: the parameters from before train nothing.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_proto.errors import InvalidSpec

References = dict[int, weakref.ref[Tensor]]
"""Weak references to parameters, by the parameter's id."""


def references(parameters: Iterable[Tensor]) -> References:
    """Return weak references to the parameters."""
    return {id(each): weakref.ref(each) for each in parameters}


class OtherParameters:
    """Check that the script's own optimizers step neither the model's parameters nor the other
    parameters of noted losses, and that the script uses no parameters that the model has lost."""

    def __init__(
        self,
        own: Callable[[], Iterable[Tensor]],
        given: References,
        optimizers: Sequence[Optimizer],
        commits: Callable[[], bool],
        begins: Callable[[], None],
    ) -> None:
        """`own` returns the distributed model's present parameters. `given`: the script's
        parameters of the model. `optimizers`: distributed with the model. While `commits()` is
        true, other optimizers may step the model too. `begins` is called when another optimizer
        takes its first step while `commits()` is false."""
        self._own = own
        self._former = given
        """Parameters of the script's model, and of the model in earlier generations."""
        self._optimizers = optimizers
        self._commits = commits
        self._begins = begins
        self._begun: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: References = {}
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def note_former(self, parameters: Iterable[Tensor]) -> None:
        """Note those of the last generation's parameters that the model no longer has."""
        # No reference to others: torch cannot convert a DTensor with a weak reference.
        model_ids = {id(each) for each in self._own()}
        former = self._former | references(each for each in parameters if id(each) not in model_ids)
        self._former = {key: each for key, each in former.items() if each() is not None}

    def note_loss(self, loss: Tensor) -> None:
        """Note the other parameters of a loss before its backward pass. Raises InvalidSpec for a
        former parameter."""
        model_ids = {id(each) for each in self._own()}
        leaves = [each for each in _leaves(loss) if isinstance(each, nn.Parameter)]
        self.check_present(leaves, "a loss of session.backward")
        self._others |= references(each for each in leaves if id(each) not in model_ids)

    def check_present(self, parameters: Iterable[Tensor], use: str) -> None:
        """Raise InvalidSpec if one of the parameters was trained, and is the model's no more."""
        former = [each for each in parameters if each.requires_grad and _has(self._former, each)]
        if former:
            model_ids = {id(each) for each in self._own()}
            for each in former:
                if id(each) not in model_ids:
                    raise _of_the_past(use, each)

    def release(self) -> None:
        """Remove the hook when the session ends. May be called twice."""
        self._hook.remove()
        self._others.clear()
        self._former = {}

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer in self._optimizers:
            return
        if optimizer not in self._begun and not self._commits():
            self._begun.add(optimizer)
            self._begins()
        model_parameters = {} if self._commits() else self._former | references(self._own())
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if _has(self._others, parameter):
                    raise _apart(optimizer, index, parameter)
                if _has(model_parameters, parameter):
                    raise _not_distributed(optimizer, index, parameter)


def _has(refs: References, parameter: Tensor) -> bool:
    # The id of a parameter that is gone may have been reused.
    reference = refs.get(id(parameter))
    return reference is not None and reference() is parameter


def nodes_of(loss: Tensor) -> set[Node]:
    """Return all nodes that a backward pass of the loss goes through."""
    return nodes_from([loss.grad_fn])


def nodes_from(nodes: Iterable[Node | None]) -> set[Node]:
    """Return these nodes, and all that a backward pass reaches from them."""
    reached: set[Node] = set()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node is not None and node not in reached:
            reached.add(node)
            ahead += [before for before, _ in node.next_functions]
    return reached


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    for node in nodes_of(loss):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def _of_the_past(use: str, parameter: Tensor) -> InvalidSpec:
    return InvalidSpec(
        f"{use} uses a parameter that the model no longer has",
        seen=f"a parameter of shape {tuple(parameter.shape)}, from before session.distribute or"
        " from an earlier generation: it has no gradient, and nothing trains it",
        expected="parameters of the model that session.distribute returned, listed in each step",
        fix="Call model.parameters() of that model in the step in place of a list that is kept, and"
        " clip by session.clip_grad_norm. A loss function may hold no parameter of the model: let"
        " the model's forward return it (docs/loop.md, 'What differs from plain PyTorch').",
    )


def _apart(optimizer: Optimizer, group: int, parameter: Tensor) -> InvalidSpec:
    return InvalidSpec(
        "an optimizer of the script's own applies gradients that differ between members",
        seen=f"{type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} in"
        f" group {group}, which session.backward went through and the distributed model lacks",
        expected="all parameters that a loss trains to be distributed: else members' copies differ",
        fix="Distribute both, in a list with their optimizers (docs/models.md, 'Several models"
        " and optimizers'), or one module that holds all parameters.",
    )


def _not_distributed(optimizer: Optimizer, group: int, parameter: Tensor) -> InvalidSpec:
    return InvalidSpec(
        "an optimizer that was not distributed steps parameters of the distributed model",
        seen=f"{type(optimizer).__name__} with a parameter of shape {tuple(parameter.shape)} in"
        f" group {group}",
        expected="all optimizers of the model given to session.distribute, and no step() of theirs"
        " in the loop: steps of another optimizer are not part of the job, and train nothing if the"
        " model is sharded or copied",
        fix="Distribute both, in a list: session.distribute([model], [first, second]), see"
        " docs/models.md, 'Several models and optimizers'.",
    )
