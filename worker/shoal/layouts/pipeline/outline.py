"""A model's forward pass as a chain of layers, cut into stages.

The pass is traced with torch.fx down to the layers, once for all world sizes and without an
example input.

*Inputs* are known to every stage. *Repeatable* values follow from inputs, parameters and shapes
alone: each stage computes those that it needs. Every other value, and every value that is changed
in place, is computed by one stage and sent from stage to stage up to its last user. Views of a
changed value are not sent: each stage makes them again, so that they share the memory that the
stage received.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from shoal.layouts.pipeline.tracing import signature, trace
from shoal.torch_private.tensors import returns_new_memory, returns_tensor, takes_tensor
from shoal_proto.errors import InvalidSpec

_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "uniform")
_SHAPE_METHODS = frozenset({"size", "dim", "ndimension", "numel", "is_floating_point"})
_SHAPE_ATTRIBUTES = frozenset({"shape", "ndim", "device", "dtype"})
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and name[1:] in dir(operator)
) | {operator.setitem}
_LAYERS_WITH_NEW_MEMORY = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "instancenorm", "normalization", "pooling")
)
"""Python modules of torch with layers that return new memory, unless they change their input in
place."""
_LAYERS_OF_TENSORS = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "dropout", "linear", "normalization")
)
"""Python modules of torch with layers whose first input is a tensor."""
# fmt: off
_VIEWS = frozenset({
    "view", "view_as", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "expand_as",
    "narrow", "select", "diagonal", "swapaxes", "movedim", "detach", "chunk", "split",
    "tensor_split", "unbind"
})
# fmt: on
"""Operations whose results are views of their first argument, whatever its strides. (`reshape`,
`flatten` and `contiguous` copy some tensors.)"""
_LISTS = frozenset({"chunk", "split", "tensor_split", "unbind"})
_VIEW_ATTRIBUTES = frozenset({"T", "mT"})


@dataclass(frozen=True, kw_only=True)
class ModelSegment:
    """Smallest part of a stage: one call of a layer with parameters, and the operations up to the
    next such call."""

    name: str
    """Name of the layer in the model; "NAME@2" for its second call in a pass."""
    num_bytes: int


class Outline:
    """Forward pass of a model in training and in evaluation, cut into the same segments. `opened`:
    modules that are traced into. Raises InvalidSpec if the model cannot be traced."""

    def __init__(self, model: nn.Module, opened: Collection[str] = ()) -> None:
        self.opened = frozenset(opened)
        self.parameters = signature(model)
        self._flows: dict[bool, SegmentTrace] = {}
        self._functions: dict[tuple[bool, tuple[int, ...], int], Callable[..., Any]] = {}
        names: list[str] | None = None
        for training in (True, False):
            graph = trace(model, self.opened, training)
            self._flows[training] = SegmentTrace(graph, model, names)
            names = self._flows[True].names
        sizes = _num_bytes(model, self._flows[True].needed_names())
        self.segments = tuple(
            ModelSegment(name=name, num_bytes=size)
            for name, size in zip(names or (), sizes, strict=True)
        )

    def graph(self, training: bool, stage_of: Sequence[int], stage: int) -> fx.Graph:
        """Build the graph of one stage; `stage_of` gives the stage of each segment. Arguments: the
        model's inputs, then the previous stage's values. Result: a tuple for the next stage, or the
        model's outputs."""
        return self._flows[training].cut(stage_of, stage)

    def function(self, training: bool, stage_of: Sequence[int], stage: int) -> Callable[..., Any]:
        """Return the graph as a function of the module and its inputs; the same object each time,
        for torch.compile. (fx's interpreter takes ten times as long.)"""
        key = training, tuple(stage_of), stage
        if key not in self._functions:
            code = self.graph(training, stage_of, stage).python_code("self")
            names = dict(code.globals)
            exec(code.src, names)
            self._functions[key] = names["forward"]
        return self._functions[key]


class SegmentTrace:
    """Trace of a model, with the segment in which each node is computed."""

    def __init__(self, graph: fx.Graph, model: nn.Module, names: list[str] | None) -> None:
        self._graph = graph
        self.names: list[str] = [] if names is None else names
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._segment: dict[fx.Node, int] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        calls: dict[str, int] = {}
        numbers = {name: number for number, name in enumerate(names or ())}
        current = 0
        self._changes, views = _changes_in_place(graph, model)
        changed = {node for change in self._changes for node in change.sharing}
        computed_once = set(views)  # A sum of a view, for instance, must not see a later change.
        for node in graph.nodes:
            repeatable = node in views or _is_repeatable(node, computed_once, changed)
            self._sources[node] = frozenset().union(
                *({n} if n in self._segment else self._sources[n] for n in node.all_input_nodes)
            )
            if node.op == "call_module" and _has_parameters(model, str(node.target)):
                calls[str(node.target)] = calls.get(str(node.target), 0) + 1
                name = _numbered(str(node.target), calls[str(node.target)])
                if names is None:
                    self.names.append(name)
                    current = len(self.names) - 1
                elif name in numbers:
                    # Evaluation may skip layers; segments stay in order.
                    current = max(current, numbers[name])
            if not repeatable:
                self._segment[node] = current
                computed_once.add(node)

    def needed_names(self) -> list[set[str]]:
        """Return the names of the modules and tensors that each segment needs."""
        used: list[set[str]] = [set() for _ in self.names]
        repeated: list[set[fx.Node]] = [set() for _ in self.names]
        for node in self._graph.nodes:
            if node in self._segment:
                segment = self._segment[node]
            elif node.op == "output" and used:
                segment = len(used) - 1
            else:
                continue
            needed = [node]
            while needed:
                each = needed.pop()
                if each.op in ("call_module", "get_attr"):
                    used[segment].add(str(each.target))
                for source in each.all_input_nodes:
                    if source not in self._segment and source not in repeated[segment]:
                        repeated[segment].add(source)
                        needed.append(source)
        return used

    def cut(self, stage_of: Sequence[int], stage: int) -> fx.Graph:
        at = {node: stage_of[segment] for node, segment in self._segment.items()}
        last_use: dict[fx.Node, int] = {}
        for node, node_stage in at.items():
            for source in self._sources[node]:
                last_use[source] = max(last_use.get(source, 0), node_stage)
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        for source in self._sources[output]:
            last_use[source] = at[output] = stage_of[-1]
        cut = fx.Graph()
        copies = {node: cut.placeholder(node.name) for node in self._inputs}
        received = _crossing(at, last_use, stage)
        copies |= {node: cut.placeholder(f"from_{node.name}") for node in received}
        changed = {
            node for each in self._changes if at[each.node] == stage for node in each.sharing
        }
        for node in received:
            if node in changed:  # autograd allows no change of a leaf
                copies[node] = cut.call_method("clone", (copies[node],))
        needed = [each for each, own in at.items() if own == stage and each is not output]
        if stage == stage_of[-1]:
            needed += output.all_input_nodes
        _copy(self._graph, cut, needed, copies)
        if stage == stage_of[-1]:
            cut.output(fx.node.map_arg(output.args[0], lambda node: copies[node]))
        else:
            cut.output(tuple(copies[node] for node in _crossing(at, last_use, stage + 1)))
        return cut


def uses_of(graph: fx.Graph) -> set[str]:
    """Return the names of the modules that a graph calls and of the tensors that it reads."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _crossing(
    at: Mapping[fx.Node, int], last_use: Mapping[fx.Node, int], stage: int
) -> list[fx.Node]:
    return [node for node, node_stage in at.items() if node_stage < stage <= last_use.get(node, -1)]


def _copy(
    graph: fx.Graph, into: fx.Graph, needed: list[fx.Node], copies: dict[fx.Node, fx.Node]
) -> None:
    wanted: set[fx.Node] = set()
    while needed:
        node = needed.pop()
        if node not in wanted and node not in copies:
            wanted.add(node)
            needed += node.all_input_nodes
    # In the order of the pass: each use of a value stays before or after a change of it in place.
    for node in graph.nodes:
        if node in wanted:
            copies[node] = into.node_copy(node, lambda source: copies[source])


def _is_repeatable(
    node: fx.Node, computed_once: Collection[fx.Node], changed: Collection[fx.Node]
) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_module" or node in changed:
        return False
    if _is_shape(node):
        return True
    if any(word in _name(node) for word in _RANDOM):
        return False
    return not any(source in computed_once for source in node.all_input_nodes)


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


@dataclass(frozen=True, kw_only=True)
class ChangeInPlace:
    """Change of a value by a node of the pass, directly or through a view."""

    node: fx.Node
    target: fx.Node
    sharing: frozenset[fx.Node]
    """Nodes up to the change, the change included, that may share the target's memory."""


def _changes_in_place(
    graph: fx.Graph, model: nn.Module
) -> tuple[list[ChangeInPlace], Collection[fx.Node]]:
    """List the changes in place of the pass, and the views of values that it changes.

    An input of the model that is changed becomes a value that the first stage sends. Nodes after
    the change of a tensor of the model, which cannot be sent, get the result of the change instead.
    Raises InvalidSpec if the pass changes a view of a tensor of the model, and uses the tensor
    afterwards. The same holds for an input, unless `_is_view` recognises the view.
    """
    if not any(_changed_by(node, model) for node in graph.nodes):
        return [], ()
    numbers = _numbers(graph)
    _take_inputs(graph, model, numbers)
    _use_targets(graph, model, numbers)
    roots = _roots(graph, model, numbers)
    order = {node: index for index, node in enumerate(graph.nodes)}
    sharing: dict[fx.Node, set[fx.Node]] = {}
    changes: list[ChangeInPlace] = []
    for node in graph.nodes:
        sharing[node] = {node}
        if node in numbers:
            continue
        target = _changed_by(node, model)
        for source in [target] if target is not None else _viewed_by(node, model):
            if source not in numbers and sharing[source] is not sharing[node]:
                sharing[node] |= sharing[source]
                for each in sharing[node]:
                    sharing[each] = sharing[node]
        if target is not None:
            known = frozenset(sharing[node])
            changes.append(ChangeInPlace(node=node, target=target, sharing=known))
    for change in changes:
        for node in change.sharing:
            later = [user for user in node.users if order[user] > order[change.node]]
            if node.op not in ("placeholder", "get_attr") or not later:
                continue
            is_call = change.node.op != "call_module"
            if node is change.target and (is_call or _returns_target(change.node, node, model)):
                node.replace_all_uses_with(change.node, delete_user_cb=later.__contains__)
            elif is_call:
                raise InvalidSpec(
                    f"the forward pass of {type(model).__name__} cannot be cut into stages",
                    seen=f"it changes a view of {node.target} in place ({_name(change.node)}), and"
                    f" uses {node.target} afterwards",
                    expected="changes in place of values that the pass makes itself",
                    fix=f"Change a copy: {node.target}.clone().",
                )
    changed = {roots[change.target] for change in changes}
    views = [
        node
        for node, root in roots.items()
        if node is not root and root in changed and root.op not in ("placeholder", "get_attr")
    ]
    return changes, views


def _take_inputs(graph: fx.Graph, model: nn.Module, numbers: Collection[fx.Node]) -> None:
    """Put a node `_taken` behind each input tensor that the pass changes: inputs are not sent, but
    the value of a computed node is sent with its changes."""
    roots = _roots(graph, model, numbers)
    targets = [_changed_by(node, model) for node in graph.nodes]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for given in inputs:
        changed = [target for target in targets if target and roots[target] is given]
        if any(target is not given for target in changed) or (changed and _is_tensor(given, model)):
            users = list(given.users)
            with graph.inserting_after(inputs[-1]):
                taken = graph.call_function(_taken, (given,))
            given.replace_all_uses_with(taken, delete_user_cb=users.__contains__)


def _taken(value: Any) -> Any:
    return value


def _use_targets(graph: fx.Graph, model: nn.Module, numbers: Collection[fx.Node]) -> None:
    """Replace the result of each change in place by the value that was changed. Both are the same
    tensor, which a stage must not receive as two."""
    roots = _roots(graph, model, numbers)
    for node in graph.nodes:
        target = _changed_by(node, model) if node not in numbers else None
        if target is None or roots[target].op in ("placeholder", "get_attr"):
            continue
        if _returns_target(node, target, model):
            node.replace_all_uses_with(target)


def _numbers(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values are sizes, or follow from sizes."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_shape(node) or (_is_operator(node) and numbers.issuperset(node.all_input_nodes)):
            numbers.add(node)
    return numbers


def _roots(
    graph: fx.Graph, model: nn.Module, numbers: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return for each node the node of which it is certainly a view: for most, the node itself."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        roots[node] = node
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _is_view(node, source, model):
            others = () if _name(node) in ("view_as", "expand_as") else node.all_input_nodes[1:]
            if all(other in numbers for other in others):
                roots[node] = roots[source]
    return roots


def _is_view(node: fx.Node, source: fx.Node, model: nn.Module) -> bool:
    """True if the value is a view of the source for certain."""
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _VIEW_ATTRIBUTES
    if node.op == "call_function" and node.target is operator.getitem:
        index = node.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        is_basic = all(
            each is None or each is ... or type(each) in (int, slice) or isinstance(each, fx.Node)
            for each in parts
        )
        is_of_tensor = (
            isinstance(index, tuple) and any(type(each) is slice for each in parts)
        ) or (_name(source) in _LISTS or _is_tensor(source, model))
        return is_basic and is_of_tensor
    return _is_torch(node) and _name(node) in _VIEWS


def _is_tensor(node: fx.Node, model: nn.Module) -> bool:
    """True if the value is a tensor for certain, by the operation that makes it or by one that uses
    it; False for most lists of tensors."""
    if node.op == "get_attr" or (_is_torch(node) and returns_tensor(_name(node))):
        return True
    users = [user for user in node.users if user.args and user.args[0] is node]
    return any(
        _is_layer_of(user, model, _LAYERS_OF_TENSORS)
        or (_is_torch(user) and (user.op == "call_method" or takes_tensor(_name(user))))
        for user in users
    )


def _is_torch(node: fx.Node) -> bool:
    """True for an operation of torch, or a method of tensors that lists and dicts do not have."""
    name = _name(node)
    if node.op == "call_method":
        return hasattr(Tensor, name) and not hasattr(list, name) and not hasattr(dict, name)
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and module.partition(".")[0] == "torch"


def _is_layer_of(node: fx.Node, model: nn.Module, modules: Collection[str]) -> bool:
    return (
        node.op == "call_module"
        and type(model.get_submodule(str(node.target))).__module__ in modules
    )


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"


def _changed_by(node: fx.Node, model: nn.Module) -> fx.Node | None:
    """Return the node whose value this one changes in place, or may change, if any."""
    name = _name(node)
    target = node.kwargs.get("out")
    if node.op == "call_module":
        parts = model.get_submodule(name).modules()
        may_change = any(getattr(part, "inplace", False) for part in parts)
        changes = may_change and not _has_parameters(model, name)
    elif node.op in ("call_function", "call_method"):
        changes = (
            node.target in _IN_PLACE
            or (name.endswith("_") and not name.endswith("__"))
            or (node.op == "call_function" and bool(node.kwargs.get("inplace")))
        )
    else:
        return None
    if changes:
        target = next(iter(node.all_input_nodes), None)
    return target if isinstance(target, fx.Node) else None


def _returns_target(node: fx.Node, target: fx.Node, model: nn.Module) -> bool:
    """True if a change in place certainly returns the value that it has changed."""
    if node.op == "call_module":
        return _is_layer_of(node, model, _LAYERS_OF_TENSORS)
    return _is_torch(node) or (_is_operator(node) and _is_tensor(target, model))


def _viewed_by(node: fx.Node, model: nn.Module) -> list[fx.Node]:
    """Return the nodes of which this one may be a view."""
    if node.op == "call_module":
        is_fresh = _is_layer_of(node, model, _LAYERS_WITH_NEW_MEMORY)
        is_fresh = is_fresh or _has_parameters(model, str(node.target))
    elif _is_operator(node):
        is_fresh = node.target is not operator.getitem
    else:
        is_fresh = returns_new_memory(_name(node))
    return [] if is_fresh else node.all_input_nodes


def _has_parameters(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _num_bytes(model: nn.Module, uses: Sequence[Collection[str]]) -> list[int]:
    used_by: dict[str, list[int]] = {}
    for index, names in enumerate(uses):
        for name in names:
            used_by.setdefault(name, []).append(index)
    parameters: list[dict[int, int]] = [{} for _ in uses]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for path in paths_of(name):
            for index in used_by.get(path, ()):
                parameters[index][id(parameter)] = parameter.nbytes
    return [sum(sizes.values()) for sizes in parameters]


def is_used(tensor: str, uses: Collection[str]) -> bool:
    """True if `uses`, names of modules and tensors, has this tensor or a module that contains
    it."""
    return any(path in uses for path in paths_of(tensor))


def paths_of(name: str) -> Iterator[str]:
    """List the paths along a name: for a.b.weight these are a, a.b and a.b.weight."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _numbered(name: str, call: int) -> str:
    return name if call == 1 else f"{name}@{call}"
