"""Groups of modules with parameters that are gathered together, in one collective: several small
modules, one block, or one large layer. Groups depend only on the module tree and sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shoal_proto.errors import InvalidSpec

MIN_GROUP_BYTES = 1 << 20
MOST_FULL_GROUPS = 24
"""Divisor of the model's size: the quotient, but at least `MIN_GROUP_BYTES` and at most
`LARGE_BYTES`, is the default minimum size of a group."""
LARGE_BYTES = 32 << 20
"""Limit of the minimum size: a group of this size is always worth a collective."""

# These modules read the weights of their children.
_INDIVISIBLE = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True, kw_only=True)
class ModuleGroup:
    """Parameters that are gathered, freed and reduced together."""

    modules: tuple[str, ...]
    """Paths, in the order of registration; "" is the model itself."""
    parameters: tuple[str, ...]
    num_bytes: int

    @property
    def title(self) -> str:
        """Title for a table: the paths of the first and the last module."""
        first, last = self.modules[0] or "(model)", self.modules[-1]
        return first if len(self.modules) == 1 else f"{first} .. {last}"


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Partition of a model's parameters into groups."""

    groups: tuple[ModuleGroup, ...]
    rest: ModuleGroup
    """Parameters of no other group, such as shared ones: gathered when the model's forward pass
    begins. May be empty."""

    def __iter__(self) -> Iterator[ModuleGroup]:
        return iter((self.rest, *self.groups) if self.rest.parameters else self.groups)


def group_modules(model: nn.Module, min_group_bytes: int | None = None) -> Grouping:
    """Partition the model into groups of at least `min_group_bytes` bytes, or of at least half as
    many if there is no further small module beside the group.

    Small modules are joined with their neighbours under the same parent. A large module is divided
    further, unless it is one of several blocks of the same class in a list.

    `min_group_bytes`: None is 1/24 of the model, at least 1 MiB and at most 32 MiB. With 0, every
    module with parameters of its own is a group, except in torch's attention and transformer
    layers. Raises InvalidSpec if it is negative, or if trained parameters of a group have several
    dtypes.
    """
    if min_group_bytes is not None and min_group_bytes < 0:
        raise InvalidSpec(
            "min_group_bytes is out of range", seen=f"{min_group_bytes}", expected="at least 0"
        )
    if min_group_bytes is None:
        total = sum(parameter.nbytes for parameter in model.parameters())
        min_group_bytes = max(MIN_GROUP_BYTES, min(total // MOST_FULL_GROUPS, LARGE_BYTES))
    cut = _Cut(model, min_group_bytes)
    # Inner modules come first: a module's group takes what its parts' groups left.
    groups = tuple(cut.group(paths) for paths in cut.groups())
    grouping = Grouping(groups=groups, rest=cut.group([""]))
    parameters = dict(model.named_parameters())
    for group in grouping:
        _check_dtypes(group, parameters)
    return grouping


class _Cut:
    def __init__(self, model: nn.Module, least_bytes: int) -> None:
        self._model = model
        self._least_bytes = least_bytes
        self._bytes_of: dict[nn.Module, int] = {}
        self._ungrouped = {id(parameter): name for name, parameter in model.named_parameters()}
        paths: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            paths.setdefault(id(parameter), []).append(name)
        self._shared = {key: found for key, found in paths.items() if len(found) > 1}

    def groups(self) -> list[list[str]]:
        return self._cut("", self._model)

    def group(self, paths: list[str]) -> ModuleGroup:
        names, num_bytes = [], 0
        for path in paths:
            for parameter in self._model.get_submodule(path).parameters():
                name = self._ungrouped.pop(id(parameter), None)
                if name is not None:
                    names.append(name)
                    num_bytes += parameter.nbytes
        return ModuleGroup(modules=tuple(paths), parameters=tuple(names), num_bytes=num_bytes)

    def _cut(self, path: str, module: nn.Module) -> list[list[str]]:
        if self._stays_whole(module):
            return []
        groups: list[list[str]] = []
        run: list[str] = []
        for child_path, child, is_block in self._parts(path, module):
            num_bytes = self._num_bytes(child)
            if not num_bytes:
                continue
            if not self._is_closed(child_path, child):
                # A parameter of the child is also used elsewhere: it goes to the rest.
                groups += self._close(run) + self._cut(child_path, child)
                run = []
            elif num_bytes < self._least_bytes:
                run.append(child_path)
                if self._size_of(run) >= self._least_bytes:
                    groups, run = [*groups, run], []
            else:
                groups += self._close(run) + self._large(child_path, child, is_block)
                run = []
        return groups + self._close(run)

    def _large(self, path: str, module: nn.Module, is_block: bool) -> list[list[str]]:
        if self._stays_whole(module) or (is_block and self._least_bytes):
            return [[path]]
        below = self._cut(path, module)
        own = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
        grouped = sum(self._size_of(paths) for paths in below)
        rest_bytes = self._num_bytes(module) - grouped
        worth = rest_bytes >= self._least_bytes if self._least_bytes else own > 0
        return [*below, [path]] if worth else below

    def _close(self, run: list[str]) -> list[list[str]]:
        return [run] if run and 2 * self._size_of(run) >= self._least_bytes else []

    def _parts(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield (path, child, is one of several blocks of its class) for callable children."""
        children = [(name, child) for name, child in module.named_children()]
        kinds = [type(child) for _, child in children]
        in_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        for name, child in children:
            child_path = f"{path}.{name}" if path else name
            if not _can_be_called(child):
                yield from self._parts(child_path, child)
                continue
            composite = any(True for _ in child.children()) and type(child) is not nn.Sequential
            yield child_path, child, in_list and composite and kinds.count(type(child)) > 1

    def _is_closed(self, path: str, module: nn.Module) -> bool:
        return all(
            shared_path.startswith(f"{path}.")
            for parameter in module.parameters()
            for shared_path in self._shared.get(id(parameter), ())
        )

    def _stays_whole(self, module: nn.Module) -> bool:
        return isinstance(module, _INDIVISIBLE) or not any(True for _ in module.children())

    def _num_bytes(self, module: nn.Module) -> int:
        if module not in self._bytes_of:
            self._bytes_of[module] = sum(parameter.nbytes for parameter in module.parameters())
        return self._bytes_of[module]

    def _size_of(self, paths: list[str]) -> int:
        return sum(self._num_bytes(self._model.get_submodule(path)) for path in paths)


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _check_dtypes(group: ModuleGroup, parameters: Mapping[str, nn.Parameter]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for name in group.parameters:
        if parameters[name].requires_grad:
            dtypes.setdefault(parameters[name].dtype, name)
    if len(dtypes) > 1:
        raise InvalidSpec(
            f"the group {group.title} has parameters of several dtypes",
            seen=", ".join(f"{name}: {dtype}" for dtype, name in dtypes.items()),
            expected="one dtype for all parameters that require a gradient",
            fix="Make the model with one dtype; param_dtype='bf16' lets it compute in bfloat16.",
        )
