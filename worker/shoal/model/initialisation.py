"""Initial weights of a model on the meta device, computed by its own modules.

The result equals, in one process,

    torch.manual_seed(seed); model.to_empty(device="cpu"); module.reset_parameters() for each module

in the order in which constructors end: a module's children before the module.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.torch_private.modules import buffer_table, parameter_table
from shoal_proto.errors import InvalidSpec

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods that initialise a module's own tensors; torch's attention and transformers use the
latter."""
OTHERS = ("init_weights", "_init_weights", "initialize_weights")
"""Methods that initialise a model's children, with unknown arguments."""

_TAKEN = "_shoal_taken"


def is_on_meta(model: nn.Module) -> bool:
    """True if a parameter or buffer of the model has no memory yet."""
    return any(_lacks_memory(part) for part in model.modules())


def mark_taken(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter without memory as taken by a session. Returns the parameter."""
    parameter.__dict__[_TAKEN] = True
    return parameter


def refuse_lazy(model: nn.Module) -> None:
    """Raise InvalidSpec for a model with a lazy layer that has not seen its first batch."""
    lazy = next((name for name, tensor in _named(model) if is_lazy(tensor)), None)
    if lazy is not None:
        raise InvalidSpec(
            "the model has a lazy layer whose shape is not known yet",
            seen=f"{lazy}, which the first forward pass will make",
            expected="a model whose parameters all have a shape: run one batch through it before it"
            " is distributed",
        )


def refuse_reused(model: nn.Module) -> None:
    """Raise InvalidSpec for a model with weights that an earlier session has taken: its modules
    would draw new initial values."""
    for name, parameter in model.named_parameters():
        if _TAKEN in parameter.__dict__:
            raise InvalidSpec(
                "the model's weights went to an earlier session",
                seen=f"{name}, which has no memory: a strategy that spreads a model took it over",
                expected="a model, and an optimizer, made anew for each session",
                fix="To train on from the earlier session's weights, call session.state_dict()"
                " within that session's block, and load the result into the new model.",
            )


def give_buffers(model: nn.Module) -> None:
    """Compute the buffers of a model on the meta device, in host memory; parameters stay on meta.
    Raises what `initialised_copy` raises."""
    for path, part in model.named_modules():
        _check(path, part)
    for path, part in list(model.named_modules()):
        empty = [name for name, buffer in buffer_table(part).items() if _is_empty(buffer)]
        if empty:
            # Only this module itself gets memory; its children stay on meta.
            alone = copy.deepcopy(part)
            marked = _with_memory(alone, {})
            with torch.random.fork_rng(devices=[]):
                _reset(alone)
            _check_filled(path, marked)
            for name in empty:
                buffer_table(part)[name] = buffer_table(alone)[name]


def initialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Initialise the parameters and buffers of a model on the meta device, in memory on `device`.

    Parameters stay the same objects, and random generators keep their states. Raises what
    `initialised_copy` raises.
    """
    if not is_on_meta(model):
        return
    ready = initialised_copy(model, seed)
    values = dict(_named(ready))
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in _named(model)}.values():
        if _is_empty(tensor):
            value: Any = values[name].detach().to(device)
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


def initialised_copy(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the model in host memory, with the initial values of its modules. Raises
    InvalidSpec with the name of a module that cannot initialise its own tensors, or leaves an
    element unset."""
    for path, part in model.named_modules():
        _check(path, part)
    copied = copy.deepcopy(model)
    parts = [(path, part) for path, part in _children_first(copied) if _lacks_memory(part)]
    memory: dict[int, Tensor] = {}
    marked = {path: _with_memory(part, memory) for path, part in parts}
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which also seeds the generators of GPUs.
        torch.default_generator.manual_seed(seed)
        for _, part in parts:
            _reset(part)
    for path, tensors in marked.items():
        _check_filled(path, tensors)
    return copied


def _children_first(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    known: set[int] = set()

    def walk(part: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(part) not in known:
            known.add(id(part))
            for name, child in part.named_children():
                yield from walk(child, f"{path}.{name}" if path else name)
            yield path, part

    yield from walk(module, "")


def _own(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (parameter_table(part), buffer_table(part)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_empty(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _lacks_memory(part: nn.Module) -> bool:
    return any(_is_empty(tensor) for _, tensor in _own(part))


def _check(path: str, part: nn.Module) -> None:
    subject = f"module {path!r}" if path else "the model"
    if any(_is_empty(tensor) for tensor in part.parameters()):
        other = next((name for name in OTHERS if callable(getattr(part, name, None))), "")
        if other:
            raise InvalidSpec(
                f"{subject}, a {type(part).__name__}, has its own initialisation",
                seen=f"{other}, with weights on the meta device",
                expected="modules that reset_parameters() initialises",
                fix="Make this module on the host, or give its parts reset_parameters methods.",
            )
    for name, value in vars(part).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise InvalidSpec(
                f"{subject}, a {type(part).__name__}, has a tensor on the meta device",
                seen=f"the attribute {name}, which is neither a parameter nor a buffer",
                expected="a buffer, which reset_parameters() fills",
                fix="Register it as a buffer, or make it on the host.",
            )
    empty = {name: tensor for name, tensor in _own(part) if _is_empty(tensor)}
    if not empty:
        return
    if not any(callable(getattr(part, reset, None)) for reset in RESETS):
        raise InvalidSpec(
            f"{subject}, a {type(part).__name__}, cannot initialise what it has on the meta device",
            seen=f"{', '.join(empty)}, and no method reset_parameters",
            expected="reset_parameters(), which fills the module's own parameters and buffers",
            fix="Add that method, or make this module on the host.",
        )
    for name, tensor in empty.items():
        if tensor.dtype == torch.bool:
            raise InvalidSpec(
                f"{subject}, a {type(part).__name__}, has a bool tensor on the meta device",
                seen=name,
                expected="numbers that show if reset_parameters() has filled them",
                fix=f"Make {name} on the host: with torch.device('cpu'): ...",
            )


def _with_memory(part: nn.Module, memory: dict[int, Tensor]) -> dict[str, Tensor]:
    """Give the module's own tensors host memory filled with `_mark`; returns them by name.
    `memory`: replacements made so far, by the tensor's id, so that tied tensors stay tied."""
    replaced: dict[str, Tensor] = {}
    tables: tuple[dict[str, Any], ...] = (parameter_table(part), buffer_table(part))
    for table in tables:
        for name, tensor in table.items():
            if not _is_empty(tensor):
                continue
            if id(tensor) not in memory:
                real: Tensor = torch.empty_like(tensor, device="cpu").fill_(_mark(tensor.dtype))
                if isinstance(tensor, nn.Parameter):
                    real = nn.Parameter(real, requires_grad=tensor.requires_grad)
                memory[id(tensor)] = real
            replaced[name] = table[name] = memory[id(tensor)]
    return replaced


def _mark(dtype: torch.dtype) -> float | int:
    """Return a value that no module uses as an initial value."""
    is_number = dtype.is_floating_point or dtype.is_complex
    return float("nan") if is_number else torch.iinfo(dtype).max


@torch.no_grad()
def _reset(part: Any) -> None:
    reset = next(name for name in RESETS if callable(getattr(part, name, None)))
    getattr(part, reset)()


def _check_filled(path: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        mark = _mark(tensor.dtype)
        unset = tensor.isnan() if isinstance(mark, float) else tensor == mark
        if bool(unset.any()):
            raise InvalidSpec(
                f"reset_parameters of module {path!r} does not fill its tensors",
                seen=f"{int(unset.sum())} of {tensor.numel()} elements of {name} left as they were",
                expected="a value for each element of the module's own parameters and buffers",
                fix="Let reset_parameters fill it, or make the module on the host.",
            )
