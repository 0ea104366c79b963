"""Hooks of a script on modules, in the copies of the model that the layouts train."""

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from shoal.model.module_proxy import unwrapped_modules
from shoal.torch_private.modules import HookTables, copy_backward_kind, hook_tables

_NOT_THE_SCRIPTS = ("torch", "shoal")


def shared_with_copies(model: nn.Module) -> dict[int, Any]:
    """Return the objects, by id, that hooks of the model call and that its copies must call too:
    what such an object collects is then seen by the script.

    Objects that hold modules, parameters or buffers of the model are left out: a copy of the model
    needs its own ones.
    """
    parts = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    shared: dict[int, Any] = {}
    for module in model.modules():
        for hook in (each for table, _ in hook_tables(module) for each in table.values()):
            objects = list(_objects_of(hook))
            if _is_scripts(hook) and not any(
                id(each) in parts for one in objects for each in (one, *_held_by(one))
            ):
                shared |= {id(each): each for each in objects}
    return shared


class ScriptHooks:
    """Hooks that the script has added to the modules of one model, or removed, since the model was
    laid out; carried from one generation to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, list[set[int]]] = {}

    def carry(self, model: nn.Module, into: nn.Module) -> None:
        """Change the hooks of another model that was just laid out as the script has changed those
        of `model` since the last call."""
        seen, parts = self._seen, unwrapped_modules(model)
        self._seen = {}
        for name, part in unwrapped_modules(into).items():
            others = hook_tables(part)
            self._seen[name] = [set(table) for table, _ in others]
            if name in seen and name in parts:
                copy_backward_kind(parts[name], part)
                for known, present, other in zip(
                    seen[name], hook_tables(parts[name]), others, strict=True
                ):
                    _carry(known, present, other)


class _Carried:
    """Hook of an earlier generation, until the script removes it by its handle, which refers to
    that generation's table."""

    def __init__(self, hook: Any, table: dict[int, Any], key: int) -> None:
        self.hook, self._table, self._key = hook, table, key

    @property
    def is_removed(self) -> bool:
        return self._key not in self._table

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.is_removed else self.hook(*args, **kwargs)


def _carry(known: set[int], present: HookTables, other: HookTables) -> None:
    (table, flags), (into, other_flags) = present, other
    for key in known - table.keys():
        into.pop(key, None)
    for key in sorted(table.keys() - known):
        hook = table[key]
        carried = hook if isinstance(hook, _Carried) else _Carried(hook, table, key)
        if _is_scripts(carried.hook) and not carried.is_removed:
            into[key] = carried
            for own, others in zip(flags, other_flags, strict=True):
                others.update({key: own[key]} if key in own else {})
    # `_Carried` keeps the table: the layout's hooks in it would keep the last generation's group.
    for key in known:
        table.pop(key, None)


def _is_scripts(hook: Any) -> bool:
    last = list(_objects_of(hook))[-1]
    owner = last if isinstance(last, FunctionType) else type(last)
    return str(owner.__module__).partition(".")[0] not in _NOT_THE_SCRIPTS


def _objects_of(hook: Any) -> Iterator[Any]:
    """Yield the partial calls of a hook, then the function, or the object that it belongs to."""
    while isinstance(hook, partial):
        yield hook
        hook = hook.func
    yield getattr(hook, "__self__", hook)


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what an object holds, directly or in a list, tuple, set or dict."""
    held: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, partial):
        held = (*value.args, *value.keywords.values())
    for each in held:
        yield each
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, list | tuple | set):
            yield from each
