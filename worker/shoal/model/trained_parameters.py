"""Checks of a model: its state is in tensors, and its trained parameters and their dtypes and
shapes stay the same.

Gradients are reduced for the parameters that required one at `distribute`: copies of other
parameters would silently diverge.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import Tensor, nn

from shoal.model.module_proxy import unwrap_proxy
from shoal.model.several import models_of
from shoal.torch_private.fsdp import gathered_parameters
from shoal.torch_private.modules import contents_of, parameter_table
from shoal_proto.errors import InvalidSpec

Kind = tuple[torch.dtype, torch.Size]

_MAX_NAMED = 5
TRAINED_LATER = (
    "Before session.distribute, give the optimizer every parameter that will ever be trained. After"
    " each session.backward, set parameter.grad = None for those that this step does not train"
    " (docs/models.md, 'Layers that are trained later')."
)
"""Advice to a script that trains some parameters only from a later step on."""


class TrainedParameters:
    """Trained parameters of a model, as they were when it was distributed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = {name: each.requires_grad for name, each in model.named_parameters()}
        self._flags: list[bool] = []
        self._shown: list[nn.Module] = []
        self._layers: list[nn.Module] = []
        self._own: dict[str, Tensor] = {}
        """Parameters under all names, at distribution or the beginning of the generation."""
        self._kinds: dict[str, Kind] = {}
        self._modules: list[nn.Module] = []
        self._contents: list[object] = []
        self._parameters: list[Tensor] = []
        self._properties: list[object] = []
        """`_modules`, `_contents`, `_parameters`: what the last check saw. `_properties`:
        requires_grad, dtype and shape of each of `_parameters` then."""
        self.record_parameters()

    def record_parameters(self) -> None:
        """Record the parameters again if the proxies of the model point to other modules, as they
        can in a new generation."""
        modules = self.modules()
        if not are_same(modules, self._shown):
            self._shown, self._layers = modules, self._layers_now()
            self._own = dict(self._model.named_parameters(remove_duplicate=False))
            self._kinds = {name: _kind_of(each) for name, each in self._own.items()}

    def parameters(self) -> Iterable[Tensor]:
        """Return the model's parameters in the present generation; under FSDP also the whole ones
        of layers that are gathered now. Some come twice."""
        return chain(self._own.values(), self._model.parameters())

    @property
    def recorded(self) -> Iterable[Tensor]:
        """Parameters that `record_parameters` has recorded last."""
        return self._own.values()

    def modules(self) -> list[nn.Module]:
        """Return the modules that the model's proxies point to in the present generation."""
        return [unwrap_proxy(each) for each in models_of(self._model).values()]

    def has_any(self, parameters: Iterable[Tensor]) -> bool:
        """True if one of the parameters is the model's in the present generation."""
        model_ids = {id(each) for each in self.parameters()}
        return any(id(each) in model_ids for each in parameters)

    def check(self, step: int) -> list[nn.Module]:
        """Raise InvalidSpec if the parameters have changed. `step`: number of committed steps.
        Returns what `modules` returns: the same list object until a module changes."""
        if self._is_unchanged():
            return self._shown
        self._check(step)
        self._modules = list(self._model.modules())
        self._contents = self._contents_now()
        self._parameters = [one for one in self._contents if isinstance(one, Tensor)]
        self._properties = list(map(_PROPERTIES, self._parameters))
        return self._shown

    def _is_unchanged(self) -> bool:
        """True if nothing has changed since the last check that passed."""
        return (
            bool(self._modules)
            and are_same(self._contents_now(), self._contents)
            and list(map(_PROPERTIES, self._parameters)) == self._properties
        )

    def _contents_now(self) -> list[object]:
        return [*self.modules(), *contents_of(self._modules)]

    def _check(self, step: int) -> None:
        self.record_parameters()
        layers = self._layers_now()
        if not are_same(layers, self._layers):
            raise self._other_layers(layers, step)
        flags = [
            each.requires_grad
            for module in layers
            for each in parameter_table(module).values()
            if each is not None
        ]
        if flags != self._flags:
            self._check_flags(step)
            self._flags = flags
        self._check_objects(step)
        self._check_kinds(step)

    def _check_kinds(self, step: int) -> None:
        """Compare dtypes and shapes: an assignment to `.data` changes them in the same object."""
        for name, each in self._own.items():
            dtype, shape = _kind_of(each)
            if (dtype, shape) != self._kinds[name]:
                expected_dtype, expected_shape = self._kinds[name]
                raise InvalidSpec(
                    f"the parameter {name!r} has changed since the model was distributed",
                    seen=f"{dtype} of shape {tuple(shape)}, after {step} committed steps",
                    expected=f"{expected_dtype} of shape {tuple(expected_shape)}, as all members"
                    " have it",
                    fix="Change the model's dtype (model.half(), model.to(dtype)) before"
                    " session.distribute, or compute in another one by torch.autocast.",
                )

    def _layers_now(self) -> list[nn.Module]:
        return [module for module in self._model.modules() if parameter_table(module)]

    def _check_flags(self, step: int) -> None:
        changed = [
            name
            for name, each in self._model.named_parameters()
            if each.requires_grad != self._trained.get(name, each.requires_grad)
        ]
        if changed:
            raise self._refusal(changed, step)

    def _check_objects(self, step: int) -> None:
        """Compare objects; a parameter that is still gathered counts as its sharded one."""
        now = dict(self._model.named_parameters(remove_duplicate=False))
        others = [name for name, each in now.items() if self._own.get(name) is not each]
        if not others:
            return
        cut = {
            id(whole): own for part in self.modules() for own, whole in gathered_parameters(part)
        }
        others = [name for name in others if cut.get(id(now[name])) is not self._own.get(name)]
        if others:
            raise self._other_parameters(others, step)

    def _other_parameters(self, names: list[str], step: int) -> InvalidSpec:
        return InvalidSpec(
            "the model has other parameters than when it was distributed",
            seen=f"a new {', '.join(map(repr, names[:_MAX_NAMED]))}, after {step} committed steps",
            expected="the model's own, which the optimizer and all members have",
            fix="Before session.distribute a parameter may be replaced; after it, write to the"
            " existing one: with torch.no_grad(): parameter.copy_(values). load_state_dict does"
            " so without assign=True.",
        )

    def _other_layers(self, layers: list[nn.Module], step: int) -> InvalidSpec:
        known_ids = {id(each) for each in self._layers}
        new = {id(each) for each in layers} - known_ids
        names = [name for name, each in self._model.named_modules() if id(each) in new]
        return InvalidSpec(
            "the model has other layers than when it was distributed",
            seen=f"a new {', '.join(map(repr, names[:_MAX_NAMED]))}, after {step} committed steps"
            if names
            else f"fewer layers with parameters, after {step} committed steps",
            expected="the model's own, which the optimizer and all members have",
            fix="Change the model before session.distribute; for a new phase of training, let this"
            " job end and start another with the new model and the weights of this one.",
        )

    def _refusal(self, changed: list[str], step: int) -> InvalidSpec:
        more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        frozen = self._trained[changed[0]]
        return InvalidSpec(
            "the trained parameters differ from those when the model was distributed",
            seen=f"requires_grad of {', '.join(changed[:_MAX_NAMED])}{more} set to {not frozen},"
            f" after {step} committed steps",
            expected="requires_grad as it was at session.distribute, in each step",
            fix=TRAINED_LATER,
        )


_PROPERTIES = attrgetter("requires_grad", "dtype", "shape")


def _kind_of(tensor: Tensor) -> Kind:
    return tensor.dtype, tensor.shape


def are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """True if the sequences have the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


def refuse_extra_state(model: nn.Module) -> None:
    """Raise InvalidSpec for modules with extra state: members hand over only tensors."""
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if names:
        raise InvalidSpec(
            "modules have a state that is neither parameter nor buffer",
            seen=f"get_extra_state of {', '.join(names[:5])}",
            expected="tensors, which members can hand over",
            fix="Keep it in a persistent buffer: register_buffer(name, tensor).",
        )
