"""Several models and optimizers that are trained in one session, such as those of a GAN. Layouts
and states see one model with a part for each, and one optimizer with all groups."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.model.module_proxy import ModuleProxy, proxy_of
from shoal.model.tied_tensors import tied
from shoal_proto.errors import InvalidSpec

MAX_NAMES = 16
"""Limit of the number of models, and of optimizers, in a session."""
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


class SeveralModels(nn.ModuleDict):
    """Models by name, as one module."""

    def forward(self, *_: Any) -> Any:
        raise InvalidSpec(
            "a forward pass of several models at once", expected="a separate pass of each model"
        )


class SeveralOptimizers(Optimizer):
    """Optimizers by name, as one optimizer with the groups and the state of all."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # Not super(), which would create groups.
        self.optimizers = dict(optimizers)
        self.defaults = {k: v for each in optimizers.values() for k, v in each.defaults.items()}
        self.due: frozenset[str] = frozenset()
        self.state: Any = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers.values() for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers.values():
            each.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for each in parts_due(self):
            each.step(closure)


class _States(MutableMapping[Tensor, dict[str, Any]]):
    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._lists: list[list[Tensor]] = []
        self._owners: dict[int, Optimizer] = {}

    def _of(self, parameter: Tensor) -> Any:
        lists = [
            group["params"] for each in self._optimizers.values() for group in each.param_groups
        ]
        # A group has a new list in each generation.
        if len(lists) != len(self._lists) or any(
            one is not other for one, other in zip(lists, self._lists, strict=True)
        ):
            self._lists = lists
            self._owners = {
                id(parameter): each
                for each in self._optimizers.values()
                for group in each.param_groups
                for parameter in group["params"]
            }
        owner = self._owners.get(id(parameter))
        if owner is None:
            # State for something that is not a parameter, which is refused by name later.
            owner = next(each for each in self._optimizers.values() if parameter in each.state)
        return owner.state

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._of(parameter)[parameter]
        return state

    def __setitem__(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in each.state for each in self._optimizers.values())

    def __iter__(self) -> Iterator[Tensor]:
        for each in self._optimizers.values():
            yield from each.state

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers.values())

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        # Does not create a missing state.
        if parameter not in self:
            return default
        return self[parameter]

    def clear(self) -> None:
        for each in self._optimizers.values():
            each.state.clear()


def models_of(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return the models by name; a single model has the empty name."""
    return dict(model.items()) if isinstance(model, SeveralModels) else {"": model}


def optimizers_of(optimizer: Optimizer) -> Mapping[str, Optimizer]:
    """Return the optimizers by name; a single optimizer has the empty name."""
    if isinstance(optimizer, SeveralOptimizers):
        return optimizer.optimizers
    return {"": optimizer}


def proxies_of(model: nn.Module, route: Callable[[str], nn.Module]) -> nn.Module:
    """Return a proxy of each model for the user, see `proxy_of`; `route` gets the model's name."""
    if not isinstance(model, SeveralModels):
        return proxy_of(model, partial(route, ""))
    return SeveralModels(
        {name: proxy_of(each, partial(route, name)) for name, each in model.items()}
    )


def parts_due(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers to step now, in the order in which they were distributed."""
    if not isinstance(optimizer, SeveralOptimizers):
        return [optimizer]
    return [each for name, each in optimizer.optimizers.items() if name in optimizer.due]


def check_kinds(models: Mapping[str, Any], optimizers: Mapping[str, Any]) -> None:
    """Raise InvalidSpec if an argument is not the model or optimizer that it should be."""
    kinds: tuple[tuple[str, Mapping[str, Any], type, str], ...] = (
        ("model", models, nn.Module, "torch.nn.Module"),
        ("optimizer", optimizers, Optimizer, "torch.optim.Optimizer"),
    )
    for kind, objects, expected, called in kinds:
        for each in objects.values():
            if not isinstance(each, expected):
                raise InvalidSpec(
                    f"the {kind} given to session.distribute has another type",
                    seen=f"{type(each).__module__}.{type(each).__name__}",
                    expected=f"session.distribute(model, optimizer): as {kind} a {called}, or"
                    " several in a list or by name",
                )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise InvalidSpec for a model in a wrapper of torch's, or with one inside, and for one that
    `session.distribute` has returned."""
    if any(isinstance(each, ModuleProxy) for each in model.modules()):
        raise InvalidSpec(
            "the model is distributed already",
            seen="what an earlier call of session.distribute has returned",
            expected="a model of its own for each session",
            fix="Make the model anew. To go on from trained weights, load into it what"
            " session.state_dict() of the earlier session returns.",
        )
    wrapper = next((each for each in model.modules() if isinstance(each, _WRAPPERS)), None)
    if wrapper is not None:
        raise InvalidSpec(
            "the model is already wrapped for training by several processes",
            seen=f"session.distribute of a {type(wrapper).__name__}",
            expected="the model inside the wrapper: the session combines its gradients",
            fix="Leave out the wrapper, and `.module` after it (docs/tutorials/ddp.md has a table"
            " for scripts that come from torchrun).",
        )


def refuse_untrained(strategy: str, model: nn.Module) -> None:
    """Raise InvalidSpec for a model, or one of several, without a parameter to train."""
    for name, each in models_of(model).items():
        if not any(parameter.requires_grad for parameter in each.parameters()):
            raise InvalidSpec(
                f"the model {name} has nothing to train under {strategy}"
                if name
                else "the model has nothing to train",
                expected="a parameter that requires a gradient",
                fix="Leave a frozen model out of session.distribute, and call it as it is: it is"
                " the same on every member."
                if name
                else "",
            )


def joined(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> tuple[SeveralModels, SeveralOptimizers]:
    """Combine the models into one, and the optimizers into one.

    Raises InvalidSpec if models share a parameter or buffer, if optimizers share a parameter, for
    an invalid name, and if there is no model or no optimizer, or more than MAX_NAMES of them.
    """
    for kind, objects in (("model", models), ("optimizer", optimizers)):
        if not 1 <= len(objects) <= MAX_NAMES:
            raise InvalidSpec(
                f"the number of {kind}s is out of range",
                seen=str(len(objects)),
                expected=f"1 to {MAX_NAMES}, by name or in a list",
            )
        for name in objects:
            if not isinstance(name, str) or not (name.isidentifier() or name.isdigit()):
                raise InvalidSpec(
                    f"a name that no {kind} can have",
                    seen=repr(name),
                    expected="letters, digits and _",
                )
    try:
        joint_model = SeveralModels(models)
    except (KeyError, TypeError) as error:
        raise InvalidSpec("a model has a name that torch refuses", seen=str(error)) from error
    for name_in_second, first in tied(joint_model).items():
        if name_in_second.partition(".")[0] != first.partition(".")[0]:
            raise InvalidSpec(
                "two models share a parameter or buffer",
                seen=f"{first} and {name_in_second}",
                expected="separate parameters in each model",
                fix="Put what they share into a separate model, or both of them into one.",
            )
    owners: dict[int, str] = {}
    for name, each in optimizers.items():
        for parameter in (one for group in each.param_groups for one in group["params"]):
            if owners.setdefault(id(parameter), name) != name:
                raise InvalidSpec(
                    "two optimizers hold the same parameter",
                    seen=f"{owners[id(parameter)]!r} and {name!r}: {tuple(parameter.shape)}",
                    expected="each parameter in one optimizer",
                )
    return joint_model, SeveralOptimizers(optimizers)


class Training:
    """Mapping between optimizers and the models that they train."""

    def __init__(self, model: SeveralModels, optimizer: SeveralOptimizers) -> None:
        self._optimizers = optimizer.optimizers
        owners = {
            id(parameter): name
            for name, each in self._optimizers.items()
            for group in each.param_groups
            for parameter in group["params"]
        }
        self._trainers = {
            name: {
                owners[id(parameter)] for parameter in each.parameters() if id(parameter) in owners
            }
            for name, each in model.items()
        }

    def chosen(self, given: Optimizer | Sequence[Optimizer] | None, call: str) -> frozenset[str]:
        """Return the names of the given optimizers. `given` may be None if the session has only one
        optimizer. `call`: the script's call, for the error. Raises InvalidSpec if `given` is None
        with several optimizers, is empty, or has an optimizer that is not the session's."""
        optimizer_names = ", ".join(self._optimizers)
        if given is None and len(self._optimizers) == 1:
            return frozenset(self._optimizers)
        if given is None:
            raise InvalidSpec(
                f"{call} does not say which optimizers it is for",
                seen=f"a session of {len(self._optimizers)} optimizers: {optimizer_names}",
                expected=f"{call} with optimizer=..., one of them or a list",
            )
        listed = [given] if isinstance(given, Optimizer) else list(given)
        names = {id(each): name for name, each in self._optimizers.items()}
        if not listed or any(id(each) not in names for each in listed):
            raise InvalidSpec(
                f"{call} is for an optimizer that is not the session's",
                seen=", ".join(type(each).__name__ for each in listed) or "an empty list",
                expected=f"optimizers that session.distribute was given: {optimizer_names}",
            )
        return frozenset(names[id(each)] for each in listed)

    def models_of(self, optimizers: frozenset[str]) -> frozenset[str]:
        """Return the names of the models that these optimizers train. Raises InvalidSpec if another
        optimizer trains a part of one of these models."""
        trained = {name for name, trainers in self._trainers.items() if trainers & optimizers}
        for name in sorted(trained):
            if others := self._trainers[name] - optimizers:
                raise InvalidSpec(
                    f"the model {name!r} is trained by other optimizers too",
                    seen=f"a pass for {', '.join(sorted(optimizers))}",
                    expected=f"one for {', '.join(sorted(self._trainers[name] | others))}",
                    fix="A model's gradients are reduced together: give a list of optimizers, or"
                    " distribute the parts as models of their own.",
                )
        return frozenset(trained)
