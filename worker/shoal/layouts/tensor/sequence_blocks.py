"""Finder of blocks in which each rank can compute only its positions of the sequence.

A block takes a value and returns a value with the same positions. Its forward has only norms,
dropout, elementwise operations, pairs of split layers, inner blocks, and modules that take all
positions, such as attention.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any

from torch import fx, nn

from shoal.layouts.tensor.plan import (
    COLUMN,
    ROW,
    PlanEntry,
    SequenceEntry,
    SequenceRole,
    TensorPlan,
)
from shoal.layouts.tensor.regions import (
    DROPOUTS,
    children_of,
    is_elementwise,
    is_elementwise_node,
    traces,
)
from shoal.torch_private.modules import has_hooks, parameter_table
from shoal_proto.errors import InvalidSpec

_TORCH: Mapping[type[nn.Module], Mapping[str, tuple[int | str, ...]]] = {
    # Attention modules, with the indices of arguments that have the block's own positions.
    nn.TransformerEncoderLayer: {"self_attn": (0, 1, 2)},
    nn.TransformerDecoderLayer: {"self_attn": (0, 1, 2), "multihead_attn": (0,)},
}


def sequence_blocks(model: nn.Module, plan: Mapping[str, PlanEntry]) -> tuple[SequenceEntry, ...]:
    """Return entries for the outermost blocks that have a norm or dropout, and a linear module
    split as a column, and for their modules. `plan`: the model's tensor plan, by module."""
    entries: list[SequenceEntry] = []
    blocks: list[str] = []
    shared = _shared(model)
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}." if block else "") for block in blocks):
            continue
        inner = _Block(name, name, module, plan, shared).entries()
        roles = {entry.role for entry in inner or ()}
        if (
            inner
            and roles & {SequenceRole.NORM, SequenceRole.DROPOUT}
            and SequenceRole.COLUMN in roles
        ):
            blocks.append(name)
            entries += [SequenceEntry(module=name, role=SequenceRole.BLOCK, block=name), *inner]
    return tuple(entries)


def check_has_blocks(plan: TensorPlan) -> None:
    """Raise InvalidSpec if a plan, made for several ranks, has no blocks."""
    if not plan.sequence:
        raise InvalidSpec(
            "no block of the model can be spread by positions",
            seen="sequence=True",
            expected="blocks of norms, dropout, residual sums, split layers and attention, whose"
            " forward can be traced; see docs/tensor-parallel.md",
            fix="Distribute without sequence=True.",
        )


def _shared(model: nn.Module) -> frozenset[int]:
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    parameters = [
        p for module in modules for p in parameter_table(module).values() if p is not None
    ]
    uses = Counter(id(each) for each in (*modules, *parameters))
    return frozenset(each for each, count in uses.items() if count > 1)


def _has_hooks(module: nn.Module) -> bool:
    return any(has_hooks(each) for each in module.modules())


class _Kind(Enum):
    WHOLE = auto()
    """A value that is the same on all ranks, or no tensor."""
    OWN = auto()
    PART = auto()
    """This rank's features at all positions: between a column and its row."""


class _NoBlock(Exception):
    """Raised if a module turns out not to be a block."""


class _Block:
    def __init__(
        self,
        block: str,
        path: str,
        module: nn.Module,
        plan: Mapping[str, PlanEntry],
        shared: frozenset[int],
    ) -> None:
        self._block, self._path, self._module = block, path, module
        self._plan, self._shared = plan, shared
        self._children = dict(children_of(module))
        self._found: dict[str, SequenceEntry] = {}

    def entries(self) -> list[SequenceEntry] | None:
        """Return the entries of the module's children; None if the module is not a block."""
        if _has_hooks(self._module):
            return None  # Hooks would see only this rank's positions.
        try:
            return self._of_torch() if type(self._module) in _TORCH else self._of_graphs()
        except Exception:  # noqa: BLE001 - a user's forward may raise anything when given symbols
            return None

    def _of_graphs(self) -> list[SequenceEntry] | None:
        variants: list[dict[str, SequenceEntry]] = []
        for graph in traces(self._module):
            self._found = {}
            self._follow(graph)
            variants.append(self._found)
        alike = variants and all(each == variants[0] for each in variants)
        return list(variants[0].values()) if alike else None

    def _of_torch(self) -> list[SequenceEntry] | None:
        """Return the entries of one of torch's transformer layers; None if its linear modules are
        not a pair."""
        if not self._is_paired("linear1", COLUMN) or not self._is_paired("linear2", ROW):
            return None
        takes = _TORCH[type(self._module)]
        for name, child in self._children.items():
            if name in takes:
                self._note(name, SequenceRole.AROUND, takes[name])
            elif isinstance(child, nn.LayerNorm):
                self._note(name, SequenceRole.NORM)
            elif name != "dropout" and type(child) in DROPOUTS:
                self._note(name, SequenceRole.DROPOUT)
        self._note("linear1", SequenceRole.COLUMN)
        self._note("linear2", SequenceRole.ROW)
        return list(self._found.values())

    def _note(self, name: str, role: SequenceRole, takes: tuple[int | str, ...] = (0,)) -> None:
        """Add an entry. Raises _NoBlock for a module that is used elsewhere too."""
        child = self._module.get_submodule(name)
        # In a block a gradient covers some positions, elsewhere all: no sum of both.
        own = child.parameters() if role in (SequenceRole.NORM, SequenceRole.ROW) else ()
        if any(id(each) in self._shared for each in (child, *own)):
            raise _NoBlock
        path = f"{self._path}.{name}" if self._path else name
        self._found[path] = SequenceEntry(module=path, role=role, block=self._block, takes=takes)

    def _is_paired(self, name: str, style: str) -> bool:
        entry = self._plan.get(f"{self._path}.{name}" if self._path else name)
        return entry is not None and entry.style == style and entry.paired

    def _follow(self, graph: fx.Graph) -> None:
        kinds: dict[fx.Node, _Kind] = {}
        first = next(iter(graph.nodes))
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        for node in graph.nodes:
            if node.op == "placeholder":
                kinds[node] = _Kind.OWN if node is first else _Kind.WHOLE
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node) or kinds[node.args[0]] != _Kind.OWN:
                    raise _NoBlock
            elif node.op == "call_module":
                if calls.count(str(node.target)) > 1:
                    raise _NoBlock
                kinds[node] = self._of_module(node, kinds)
            else:
                kinds[node] = self._of_function(node, kinds)
        around = {e.module for e in self._found.values() if e.role == SequenceRole.AROUND}
        users = [f"{self._path}.{user.target}".lstrip(".") for user in first.users]
        # No block: all that uses the input, such as an embedding, takes all positions.
        if all(user in around for user in users):
            raise _NoBlock

    def _of_function(self, node: fx.Node, kinds: Mapping[fx.Node, _Kind]) -> _Kind:
        given = {kinds[each] for each in node.all_input_nodes}
        if given <= {_Kind.WHOLE}:
            return _Kind.WHOLE
        if node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            around = isinstance(source, fx.Node) and self._role(source) == SequenceRole.AROUND
            if around and isinstance(index, int):
                return _Kind.OWN if index == 0 else _Kind.WHOLE
        if len(given) > 1 or not is_elementwise_node(node, None):
            raise _NoBlock
        return given.pop()

    def _role(self, node: fx.Node) -> SequenceRole | None:
        entry = self._found.get(f"{self._path}.{node.target}".lstrip("."))
        return entry.role if entry and node.op == "call_module" else None

    def _of_module(self, node: fx.Node, kinds: Mapping[fx.Node, _Kind]) -> _Kind:
        name = str(node.target)
        child = self._children[name]
        given = {kinds[each] for each in node.all_input_nodes}
        if given <= {_Kind.WHOLE}:
            return _Kind.WHOLE
        alone = len(node.args) == 1 and not node.kwargs
        if _Kind.PART in given:
            if alone and self._is_paired(name, ROW):
                self._note(name, SequenceRole.ROW)
                return _Kind.OWN
            if alone and is_elementwise(child):
                return _Kind.PART
            raise _NoBlock
        if alone and self._by_position(name, child):
            return _Kind.PART if self._is_paired(name, COLUMN) else _Kind.OWN
        self._note(name, SequenceRole.AROUND, tuple(_own_arguments(node, kinds)))
        return _Kind.OWN

    def _by_position(self, name: str, child: nn.Module) -> bool:
        """Return True if the child takes this rank's positions; then note its role, or the roles in
        an inner block."""
        path = f"{self._path}.{name}" if self._path else name
        if type(child) in (nn.LayerNorm, nn.RMSNorm) and len(child.normalized_shape) == 1:  # type: ignore[arg-type]
            self._note(name, SequenceRole.NORM)
        elif self._is_paired(name, COLUMN):
            self._note(name, SequenceRole.COLUMN)
        elif type(child) in DROPOUTS:
            self._note(name, SequenceRole.DROPOUT)
        elif not is_elementwise(child):
            inner = _Block(self._block, path, child, self._plan, self._shared).entries() or []
            if all(entry.role == SequenceRole.AROUND for entry in inner):
                return False
            self._found |= {entry.module: entry for entry in inner}
        return True


def _own_arguments(node: fx.Node, kinds: Mapping[fx.Node, _Kind]) -> Iterator[int | str]:
    given: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    for key, value in given:
        if isinstance(value, fx.Node):
            if kinds[value] == _Kind.OWN:
                yield key
        elif not isinstance(value, int | float | str | bool | None):
            raise _NoBlock  # a container, which may contain tensors of positions
