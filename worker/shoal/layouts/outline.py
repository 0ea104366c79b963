"""A model's forward pass as a chain of layers, cut so that each stage runs its part of it.

The forward pass is traced with torch.fx down to the layers and no further: inside a layer the
user's own code runs, with the shapes, modes and randomness of the moment. No example input is
needed, and what was traced once serves every world size.

Three kinds of values stand in a trace. *Inputs* are known to every stage, which all take the same
samples. What follows from inputs, parameters and shapes alone is *repeatable*: each stage computes
what it needs of it. All else is computed by one stage and sent on, through stages that only pass it
on if need be.
"""

import dis
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from shoal_proto.errors import InvalidSpec

# fx replaces nn.Module's methods for the whole process while it traces.
_tracing = threading.Lock()
# They take sizes, not tensors, so that torch would not ask a proxy among them.
_CREATORS = ("arange", "empty", "full", "ones", "zeros")
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform")
_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "is_floating_point"})
_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "device", "dtype"})
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and name[1:] in dir(operator)
) | {operator.setitem}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What no cut divides: one layer with parameters, and what is computed behind it."""

    name: str
    """The layer's name in the model; a second call of it has its number behind it."""
    num_bytes: int
    """Of the parameters used in it."""


class Outline:
    """The forward pass of a model in training and in evaluation, in the same segments.

    `opened` are the modules that the trace goes into. Raises InvalidSpec if it cannot be traced.
    """

    def __init__(self, model: nn.Module, opened: Collection[str] = ()) -> None:
        self.opened = frozenset(opened)
        self.parameters = _signature(model)
        self._flows: dict[bool, Flow] = {}
        names: list[str] | None = None
        for training in (True, False):
            with _mode(model, training):
                self._flows[training] = Flow(_trace(model, self.opened), model, names)
            names = self._flows[True].names
        self.segments = tuple(
            Segment(name=name, num_bytes=_num_bytes(model, uses))
            for name, uses in zip(names or (), self._flows[True].uses(), strict=True)
        )

    def graph(self, training: bool, stage_of: Sequence[int], stage: int) -> fx.Graph:
        """What one stage computes; `stage_of` gives the stage of each segment.

        Takes the model's inputs and then the values from the stage before; returns a tuple of the
        values for the next stage, or what the model returns.
        """
        return self._flows[training].cut(stage_of, stage)


class Flow:
    """One trace, with the segment in which each node is computed."""

    def __init__(self, graph: fx.Graph, model: nn.Module, names: list[str] | None) -> None:
        self._graph = graph
        self.names: list[str] = [] if names is None else names
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._segment: dict[fx.Node, int] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        calls: dict[str, int] = {}
        current = 0
        for node in graph.nodes:
            repeatable = _is_repeatable(node, self._segment)
            self._sources[node] = frozenset().union(
                *({n} if n in self._segment else self._sources[n] for n in node.all_input_nodes)
            )
            if node.op == "call_module" and _has_parameters(model, str(node.target)):
                calls[str(node.target)] = calls.get(str(node.target), 0) + 1
                name = _numbered(str(node.target), calls[str(node.target)])
                if names is None:
                    self.names.append(name)
                    current = len(self.names) - 1
                elif name in names:
                    # Evaluation may leave layers out; it never goes back.
                    current = max(current, names.index(name))
            if not repeatable:
                self._segment[node] = current

    def uses(self) -> list[set[str]]:
        """Modules and tensors that each segment needs, by name."""
        stage_of = range(len(self.names))
        return [uses_of(self.cut(stage_of, index)) for index in stage_of]

    def cut(self, stage_of: Sequence[int], stage: int) -> fx.Graph:
        at = {node: stage_of[segment] for node, segment in self._segment.items()}
        last_use: dict[fx.Node, int] = {}
        for node, place in at.items():
            for source in self._sources[node]:
                last_use[source] = max(last_use.get(source, 0), place)
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        for source in self._sources[output]:
            last_use[source] = at[output] = stage_of[-1]
        cut = fx.Graph()
        copies = {node: cut.placeholder(node.name) for node in self._inputs}
        for node in _crossing(at, last_use, stage):
            copies[node] = cut.placeholder(f"from_{node.name}")
        for node, place in at.items():
            if place == stage and node is not output:
                _copy(cut, node, copies)
        if stage == stage_of[-1]:
            for node in output.all_input_nodes:
                _copy(cut, node, copies)
            cut.output(fx.node.map_arg(output.args[0], lambda node: copies[node]))
        else:
            cut.output(tuple(copies[node] for node in _crossing(at, last_use, stage + 1)))
        return cut


def uses_of(graph: fx.Graph) -> set[str]:
    """Modules that a graph calls and tensors it reads, by name."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _crossing(
    at: Mapping[fx.Node, int], last_use: Mapping[fx.Node, int], stage: int
) -> list[fx.Node]:
    """Values from before a stage that it or a later one uses, in the order of the trace."""
    return [node for node, place in at.items() if place < stage <= last_use.get(node, -1)]


def _copy(into: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    for source in node.all_input_nodes:
        if source not in copies:
            _copy(into, source, copies)
    if node not in copies:
        copies[node] = into.node_copy(node, lambda source: copies[source])


def _is_repeatable(node: fx.Node, computed_once: Collection[fx.Node]) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_module":
        return False
    if node.op == "call_method" and node.target in _SHAPE_METHODS:
        return True
    if node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES:
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if in_place or any(word in name for word in _RANDOM):
        return False
    return not any(source in computed_once for source in node.all_input_nodes)


def _has_parameters(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _num_bytes(model: nn.Module, uses: Collection[str]) -> int:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    used = {p for name, p in parameters.items() if is_used(name, uses)}
    return sum(parameter.nbytes for parameter in used)


def is_used(tensor: str, uses: Collection[str]) -> bool:
    """Whether the tensor of that name is among `uses`, or in a module that is."""
    parts = tensor.split(".")
    return any(".".join(parts[: end + 1]) in uses for end in range(len(parts)))


def _numbered(name: str, call: int) -> str:
    return name if call == 1 else f"{name}@{call}"


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = {part: part.training for part in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


# --- tracing ---


def _trace(model: nn.Module, opened: Collection[str]) -> fx.Graph:
    tracer = _Tracer(opened)
    with _tracing, _creators_traced(tracer):
        try:
            return tracer.trace(model)
        except (TraceError, TypeError, RuntimeError, NameError, AttributeError) as error:
            raise InvalidSpec(
                f"the forward pass of {type(model).__name__} cannot be cut into stages",
                seen=f"{type(error).__name__}: {error}",
                expected="a forward pass that calls its layers one after the other, whatever the"
                " values and shapes of its inputs",
                fix="Move what depends on values or shapes into a layer, or make the model an"
                " nn.Sequential.",
            ) from error


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[str]) -> None:
        super().__init__()
        self._opened = opened
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[[], Any], list[Any]]:
        given = {}
        assert isinstance(self.root, nn.Module)
        for name, default in _signature(self.root).items():
            is_input = default is inspect.Parameter.empty
            given[name] = self.create_proxy("placeholder", name, (), {}) if is_input else default
        positional = _positional(self.root)
        args = [given.pop(name) for name in positional]
        return lambda: root_fn(self.root, *args, **given), []

    def to_bool(self, obj: fx.Proxy) -> bool:
        # The asserting code, Proxy.__bool__, this one.
        frame = sys._getframe(2)
        if _is_assertion(frame.f_code, frame.f_lasti):
            return True
        return bool(super().to_bool(obj))


def _is_assertion(code: Any, offset: int) -> bool:
    """Whether the truth of a value at this place only decides whether an assertion fails."""
    after = [step.opname for step in dis.get_instructions(code) if step.offset >= offset][:3]
    return "LOAD_ASSERTION_ERROR" in after


def _signature(model: nn.Module) -> dict[str, Any]:
    """The inputs of a model by name, with the value of those that it is traced with.

    An input that has a default is fixed to it, but for the first: `if mask is not None` can only
    be followed one way.
    """
    found: dict[str, Any] = {}
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        found[parameter.name] = parameter.default if found else inspect.Parameter.empty
    return found


def _positional(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


@contextmanager
def _creators_traced(tracer: fx.Tracer) -> Iterator[None]:
    """Let torch.zeros(size of an input) stand in the trace too."""
    originals = {name: getattr(torch, name) for name in _CREATORS}

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            fx.node.map_aggregate((args, kwargs), lambda a: found.append(isinstance(a, fx.Proxy)))
            if any(found):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return create

    for name, original in originals.items():
        setattr(torch, name, traced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


__all__ = ["Flow", "Outline", "Segment", "is_used", "uses_of"]
