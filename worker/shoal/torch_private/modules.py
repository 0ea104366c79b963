"""Of torch.nn: what a module itself has, without the modules in it."""

import copy
from collections.abc import Callable, Iterable, Set
from itertools import chain
from operator import attrgetter

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from shoal.torch_private.watching import before_calls


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Its own parameters by name. What is put there is the module's, unchecked and unseen by
    hooks."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Its own buffers by name, in the same way."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules right below it by name, in the same way."""
    return module._modules


_CONTENTS = attrgetter("_modules", "_parameters")


def contents_of(modules: Iterable[nn.Module]) -> list[object]:
    """What is in `child_table` and `parameter_table` of each, one after the other: in half of the
    time that it takes by those."""
    return list(chain.from_iterable(map(dict.values, chain.from_iterable(map(_CONTENTS, modules)))))


def watch_wrapping(look: Callable[[nn.Module], None]) -> None:
    """Call this with the module that a DistributedDataParallel is about to be made of, from now on,
    whoever makes it. The first call counts."""
    before_calls(DistributedDataParallel, "__init__", lambda _, module, *__, **___: look(module))


def transient_buffers(module: nn.Module) -> Set[str]:
    """Names of its own buffers that its state_dict leaves out."""
    return module._non_persistent_buffers_set


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether its buffers are running statistics of batches, as those of BatchNorm."""
    return isinstance(module, _NormBase)


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Give a module the very tables of another, so that it has whatever that one has."""
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[table] = other.__dict__[table]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody is called before, behind or in the backward pass of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def projects_together(attention: nn.MultiheadAttention) -> bool:
    """Whether query, key and value have one common weight, `in_proj_weight`."""
    return bool(attention._qkv_same_embed_dim)


def copy_with_tables(
    module: nn.Module,
    *,
    buffers: dict[str, Tensor | None],
    children: dict[str, nn.Module | None],
) -> nn.Module:
    """Another module that computes what this one does, with the same parameters and with these
    buffers and modules below it: what is put into its tables is not put into this one's."""
    made = copy.copy(module)
    # Past __setattr__, which a class of the script's may have of its own.
    tables = {"_parameters": dict(module._parameters), "_buffers": buffers, "_modules": children}
    made.__dict__.update(tables)
    return made
