"""Private parts of torch.nn: a module's own tables, statistics and hooks."""

import copy
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel

from shoal.torch_private.watching import before_calls

BatchNormBase = _BatchNorm
"""Base class of all of torch's BatchNorm layers, also lazy ones."""


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own table of parameters. Writes to it are not checked, and call no
    hooks.
    """
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own table of buffers; see `parameter_table`."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own table of children; see `parameter_table`."""
    return module._modules


_CONTENTS = attrgetter("_modules", "_parameters")


def contents_of(modules: Iterable[nn.Module]) -> list[object]:
    """Return the entries of `child_table` and `parameter_table` of all modules, in order."""
    return list(chain.from_iterable(map(dict.values, chain.from_iterable(map(_CONTENTS, modules)))))


def watch_wrapping(look: Callable[[nn.Module], None]) -> None:
    """Install `look`, called with each module that is about to be wrapped in a DDP.

    Only the first call of this function has an effect.
    """
    before_calls(DistributedDataParallel, "__init__", lambda _, module, *__, **___: look(module))


def transient_buffers(module: nn.Module) -> Set[str]:
    """Return the names of the buffers that the module's state_dict leaves out."""
    return module._non_persistent_buffers_set


def has_batch_statistics(module: nn.Module) -> bool:
    """True if the module's buffers are running statistics, as in BatchNorm."""
    return isinstance(module, _NormBase)


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Make a module use the tables of another."""
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[table] = other.__dict__[table]


HookTables = tuple[dict[int, Any], Sequence[dict[int, Any]]]
"""Hooks of one kind by the numbers of their handles, and the tables of their options."""


def hook_tables(module: nn.Module) -> list[HookTables]:
    """Return the tables of a module's hooks on its passes; see `parameter_table`."""
    return [
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
        (module._backward_pre_hooks, ()),
        (module._backward_hooks, ()),
    ]


def copy_backward_kind(module: nn.Module, into: nn.Module) -> None:
    """Make backward hooks of another module full ones if those of the module are."""
    if into._is_full_backward_hook is None:
        into._is_full_backward_hook = module._is_full_backward_hook


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks on its passes."""
    return any(table for table, _ in hook_tables(module))


def projects_together(attention: nn.MultiheadAttention) -> bool:
    """True if query, key and value share one weight, `in_proj_weight`."""
    return bool(attention._qkv_same_embed_dim)


def copy_with_tables(
    module: nn.Module,
    *,
    buffers: dict[str, Tensor | None],
    children: dict[str, nn.Module | None],
) -> nn.Module:
    """Return a copy of the module with the same parameters, these buffers and these children.

    Writes to the copy's tables do not reach the original.
    """
    copied = copy.copy(module)
    # Not by __setattr__, which the script's class may override.
    tables = {"_parameters": dict(module._parameters), "_buffers": buffers, "_modules": children}
    copied.__dict__.update(tables)
    return copied
