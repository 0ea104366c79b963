"""Digest of the model and text of the optimizer, which members compare, and listings of their
contents (`shoal_proto.listings`)."""

from collections.abc import Iterator
from hashlib import sha256

from torch import nn
from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal.model.tied_tensors import tied
from shoal_proto.listings import pack


def schema_digest(model: nn.Module) -> str:
    """Return a digest of the names, shapes and dtypes of all parameters and buffers, in order, and
    of the names that share a tensor."""
    lines = [f"{entry} {value}" for entry, value in _entries(model)]
    return sha256("\n".join(lines).encode()).hexdigest()


def optimizer_digest(optimizer: Optimizer) -> str:
    """Return the class and hyper-parameters of the optimizer, as text that members compare. Call
    this before training: schedules change learning rates."""
    parts = optimizers_of(optimizer)
    if list(parts) != [""]:
        return "; ".join(f"{name}: {optimizer_digest(each)}" for name, each in parts.items())
    groups = [
        " ".join(f"{key}={value}" for key, value in settings) for settings in _groups(optimizer)
    ]
    return f"{type(optimizer).__name__}({' | '.join(groups)})"


def listings_of(model: nn.Module, optimizer: Optimizer) -> dict[str, bytes]:
    """Return the listings of model and optimizer, by the names of their fields in the proposal."""
    return {
        "schema": pack(f"{entry}: {value}" for entry, value in _entries(model)),
        "optimizer": pack(
            f"{f'{name} ' if name else ''}{line}"
            for name, each in optimizers_of(optimizer).items()
            for line in _lines(each)
        ),
    }


def _entries(model: nn.Module) -> Iterator[tuple[str, str]]:
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield f"{kind} {name}", f"{tuple(tensor.shape)} {dtype}"
    for name, first in tied(model).items():
        yield f"tied {name}", first


def _groups(optimizer: Optimizer) -> Iterator[list[tuple[str, object]]]:
    for group in optimizer.param_groups:
        settings = [
            (key, value)
            for key, value in sorted(group.items())
            if key != "params" and isinstance(value, bool | int | float | str | tuple)
        ]
        yield [*settings, ("parameters", len(group["params"]))]


def _lines(optimizer: Optimizer) -> Iterator[str]:
    yield f"class: {type(optimizer).__name__}"
    for number, settings in enumerate(_groups(optimizer)):
        yield from (f"group {number} {key}: {value}" for key, value in settings)
