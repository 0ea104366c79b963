"""Tensors of a model that have several names: tied weights, shared modules, shared buffers.

As in torch's `named_parameters`, layouts, optimizers and states use a tensor's first name only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.torch_private.modules import buffer_table, transient_buffers
from shoal_proto.errors import InvalidSpec

_Value = TypeVar("_Value")


def tied(model: nn.Module) -> dict[str, str]:
    """Return each further name of a parameter or persistent buffer, with its first name: that of
    the parameter, if the tensor is both."""
    first: dict[int, str] = {}
    first_names: dict[str, str] = {}
    for tensors in (_parameters(model), _persistent_buffers(model)):
        for name, tensor in tensors:
            if (first_name := first.setdefault(id(tensor), name)) != name:
                first_names[name] = first_name
    return first_names


def with_tied_names(values: Mapping[str, _Value], further: Mapping[str, str]) -> dict[str, _Value]:
    """Return `values` with the further names of the same objects added. `values`: by first names.
    `further`: from `tied`."""
    added = {name: values[first] for name, first in further.items() if first in values}
    return {**values, **added}


@dataclass(frozen=True, kw_only=True)
class _Span:
    name: str
    is_parameter: bool
    device: str
    start: int
    end: int
    is_dense: bool
    """True if the tensor's elements fill the span; otherwise other tensors may lie between them."""


def refuse_hidden_ties(model: nn.Module) -> None:
    """Raise InvalidSpec if two parameters, or a parameter and a buffer, share memory without being
    one tensor."""
    near: list[_Span] = []
    for span in sorted(_spans(model), key=lambda span: (span.device, span.start)):
        near = [each for each in near if each.device == span.device and each.end > span.start]
        for other in near:
            overlaps = other.is_dense or other.start == span.start
            if overlaps and (span.is_parameter or other.is_parameter):
                raise InvalidSpec(
                    f"{other.name} and {span.name} share memory, and are not one parameter",
                    seen="two tensors over the same memory",
                    expected="one parameter under both names, or separate memory for each",
                    fix="Tie them by assigning the parameter itself (head.weight = embed.weight),"
                    " not a new parameter made of its data.",
                )
        near.append(span)


def _spans(model: nn.Module) -> Iterator[_Span]:
    parameters, buffers = model.named_parameters(), model.named_buffers()
    for tensors, is_parameter in ((parameters, True), (buffers, False)):
        for name, tensor in tensors:
            if not _has_memory(tensor):
                continue
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            num_spanned = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            yield _Span(
                name=name,
                is_parameter=is_parameter,
                device=str(tensor.device),
                start=start,
                end=start + num_spanned * tensor.element_size(),
                is_dense=num_spanned == tensor.numel(),
            )


def give_own_memory(model: nn.Module) -> None:
    """Replace expanded buffers, such as masks, by copies into which a state can be loaded."""
    replacements: dict[int, Tensor] = {}
    for part in model.modules():
        table = buffer_table(part)
        for name, buffer in table.items():
            if buffer is not None and _is_expanded(buffer):
                table[name] = replacements.setdefault(id(buffer), buffer.clone())


def _is_expanded(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in steps)


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return bool(tensor.numel() and tensor.data_ptr())


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, part in model.named_modules(remove_duplicate=False):
        for name, buffer in buffer_table(part).items():
            if buffer is not None and name not in transient_buffers(part):
                yield (f"{path}.{name}" if path else name), buffer


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the model's state_dict, each once, under its first name."""
    known = {id(parameter) for parameter in model.parameters()}
    buffers: dict[str, Tensor] = {}
    for path, part in model.named_modules():
        for name, buffer in buffer_table(part).items():
            if (
                buffer is not None
                and name not in transient_buffers(part)
                and id(buffer) not in known
            ):
                known.add(id(buffer))
                buffers[f"{path}.{name}" if path else name] = buffer
    return buffers
