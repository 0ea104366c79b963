"""Finder of linear modules that can be split as columns and a row, with nothing gathered between.

A region is a set of linear modules with outputs that reach only the input of one further linear
module, through elementwise operations: fc1 before fc2, in training and in evaluation.
"""

import inspect
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer

from shoal.randomness.dropout import KeyedDropout
from shoal.torch_private.modules import buffer_table, child_table, copy_with_tables, has_hooks

DROPOUTS = (nn.Dropout, KeyedDropout)
_ELEMENTWISE_MODULES = (
    *DROPOUTS,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
# Classes of `transformers.activations`, by name to avoid its import.
_HUGGING_FACE = frozenset(
    {
        *("AccurateGELUActivation", "ClippedGELUActivation", "FastGELUActivation"),
        *("GELUActivation", "GELUTanh", "LaplaceActivation", "LinearActivation", "MishActivation"),
        *("NewGELUActivation", "QuickGELUActivation", "ReLUSquaredActivation", "SiLUActivation"),
    }
)
_ACTIVATIONS: tuple[Any, ...] = (
    *(F.elu, F.gelu, F.hardswish, F.leaky_relu, F.mish, F.relu, F.relu6, F.silu, F.softplus),
    *(torch.relu, torch.sigmoid, torch.square, torch.tanh),
)
_ARITHMETIC: tuple[Any, ...] = (
    *(torch.add, torch.mul, torch.sub),
    *(operator.add, operator.mul, operator.neg, operator.sub, operator.truediv),
)
_ELEMENTWISE_FUNCTIONS = frozenset((*_ACTIVATIONS, *_ARITHMETIC))
_ELEMENTWISE_METHODS = frozenset(
    {"add", "contiguous", "mul", "relu", "sigmoid", "square", "sub", "tanh"}
)


@dataclass(frozen=True, kw_only=True, order=True)
class Region:
    """Region, with names relative to the module in which it was found."""

    columns: tuple[str, ...]
    row: str
    dropouts: tuple[str, ...]
    """Dropouts between columns and row: each rank needs its part of their masks."""


def regions(parent: nn.Module) -> list[Region]:
    """Find the regions in the module's own forward; no two of them share a module."""
    known = _known(parent)
    if known is not None:
        return known
    if sum(type(part) is nn.Linear for _, part in children_of(parent)) < 2:
        return []
    try:
        variants = [set(_regions_of(graph, parent)) for graph in traces(parent)]
    except Exception:  # noqa: BLE001 - a user's forward may raise anything when given symbols
        return []
    return sorted(set.intersection(*variants)) if variants else []


def is_elementwise(module: Any) -> bool:
    """True if the module, or function, does the same to each element, and nothing else looks on."""
    if isinstance(module, nn.Module) and has_hooks(module):
        return False
    kind = type(module)
    if kind.__module__ == "transformers.activations":
        return kind.__name__ in _HUGGING_FACE
    return kind in _ELEMENTWISE_MODULES


def _known(parent: nn.Module) -> list[Region] | None:
    """Return the regions of torch's transformer layers, which cannot be traced; None for other
    modules."""
    if type(parent) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        return None
    activation = parent.activation
    if activation not in _ELEMENTWISE_FUNCTIONS and not is_elementwise(activation):
        return []
    if not isinstance(parent.dropout, nn.Module) or has_hooks(parent.dropout):
        return []
    return [Region(columns=("linear1",), row="linear2", dropouts=("dropout",))]


def children_of(parent: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the parent itself calls; in place of a ModuleList, its modules."""
    for name, part in child_table(parent).items():
        if type(part) is nn.ModuleList:
            yield from children_of(part, f"{prefix}{name}.")
        elif part is not None:
            yield prefix + name, part


class _Recorder(nn.Module):
    def __init__(self, name: str, original: nn.Module, tracer: GraphAppendingTracer) -> None:
        super().__init__()
        self.__dict__["_recorded"] = (name, original, tracer)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        name, _, tracer = self.__dict__["_recorded"]
        return tracer.create_proxy("call_module", name, arguments, named)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_recorded"][1], name)
        if isinstance(value, Tensor | nn.Module) or callable(value):
            # The parent uses a part of the child without a call: a split would break that.
            raise AttributeError(name)
        return value


def _shadow(parent: nn.Module, tracer: GraphAppendingTracer) -> nn.Module:
    buffers = buffer_table(parent).items()
    return copy_with_tables(
        parent,
        buffers={name: None if buffer is None else buffer.clone() for name, buffer in buffers},
        children=dict(_recorders(parent, "", tracer)),
    )


def _recorders(
    parent: nn.Module, prefix: str, tracer: GraphAppendingTracer
) -> Iterator[tuple[str, nn.Module | None]]:
    for name, part in child_table(parent).items():
        if type(part) is nn.ModuleList:
            inner = dict(_recorders(part, f"{prefix}{name}.", tracer))
            replaced = nn.ModuleList()
            child_table(replaced).update(inner)
            yield name, replaced
        else:
            yield name, part if part is None else _Recorder(prefix + name, part, tracer)


def traces(parent: nn.Module) -> Iterator[fx.Graph]:
    """Trace forward with symbols: in training and evaluation, with and without optional arguments.
    Yields nothing for a forward with `*args` or `**kwargs`; may raise any error of the forward.

    torch.fx's own tracer would patch nn.Module for the whole process.
    """
    inputs = inspect.signature(parent.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inputs):
        return
    required = [p for p in inputs if p.default is p.empty]
    chosen = [required] if len(required) == len(inputs) else [required, list(inputs)]
    for training, given in itertools.product((True, False), chosen):
        graph = fx.Graph()
        tracer = GraphAppendingTracer(graph)
        shadow = _shadow(parent, tracer)
        shadow.training = training
        symbols = {p.name: tracer.create_proxy("placeholder", p.name, (), {}) for p in given}
        returned = shadow.forward(**symbols)
        tracer.create_node("output", "output", (tracer.create_arg(returned),), {})
        yield graph


def _regions_of(graph: fx.Graph, parent: nn.Module) -> Iterator[Region]:
    children = dict(children_of(parent))
    calls = [node for node in graph.nodes if node.op == "call_module"]
    names = [str(node.target) for node in calls]
    # A module called twice may be called inside the region and outside.
    once = {name: children[name] for name in names if names.count(name) == 1}
    taken: set[str] = set()
    for node in calls:
        if type(once.get(str(node.target))) is nn.Linear:
            region = _region_before(node, once)
            if region is not None and taken.isdisjoint({*region.columns, region.row}):
                taken |= {*region.columns, region.row}
                yield region


def _region_before(row: fx.Node, once: dict[str, nn.Module]) -> Region | None:
    if len(row.args) != 1 or row.kwargs or not isinstance(row.args[0], fx.Node):
        return None
    inside: dict[fx.Node, None] = {}
    columns: list[str] = []
    entered: set[fx.Node] = set()
    dropouts: list[str] = []
    pending = [row.args[0]]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        inside[node] = None
        module = once.get(str(node.target)) if node.op == "call_module" else None
        if type(module) is nn.Linear:
            columns.append(str(node.target))
            entered |= set(node.all_input_nodes)
        elif is_elementwise_node(node, module):
            pending += node.all_input_nodes
            dropouts += [str(node.target)] if type(module) in DROPOUTS else []
        else:
            return None
    stays = all(user is row or user in inside for node in inside for user in node.users)
    # A column needs its whole input, but values inside the region are parts.
    stays = stays and entered.isdisjoint(inside)
    widths = {once[name].out_features for name in columns} | {once[str(row.target)].in_features}
    if not columns or not stays or len(widths) != 1:
        return None
    return Region(
        columns=tuple(sorted(columns)), row=str(row.target), dropouts=tuple(sorted(dropouts))
    )


def is_elementwise_node(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_module":
        known = is_elementwise(module)
    elif node.op == "call_function":
        known = node.target in _ELEMENTWISE_FUNCTIONS
    else:
        known = node.op == "call_method" and node.target in _ELEMENTWISE_METHODS
    # A constant tensor could have any shape; a number fits every element.
    numbers = (int, float, str, bool, type(None), fx.Node)
    return known and all(isinstance(value, numbers) for value in _flat(node))


def _flat(node: fx.Node) -> Iterable[Any]:
    return itertools.chain(node.args, node.kwargs.values())
