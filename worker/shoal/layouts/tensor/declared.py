"""Attention split as its model declares: tensor-parallel plans in Hugging Face's models.

A model's `config.base_model_tp_plan` names linear modules to cut by outputs ("colwise") and by
inputs ("rowwise"). The plan promises that the attention computes each head independently.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from shoal.layouts.tensor.regions import Region

_COLUMN, _ROW = "colwise", "rowwise"


@dataclass
class _Attention:
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


def declared_regions(model: nn.Module, degree: int) -> Mapping[str, Region]:
    """Find the attention modules that can be split by whole heads over `degree` ranks; by name.

    A module is left out if

    - `degree` does not divide its numbers of heads;
    - it has dropout on attention weights: the masks would differ from those of one process;
    - it has parameters or buffers outside the linear modules: their gradients would cover some
      heads only;
    - it returns attention weights.
    """
    modules = dict(model.named_modules())
    return {
        name: Region(columns=tuple(sorted(linears.columns)), row=linears.rows[0], dropouts=())
        for name, linears in _attentions(modules).items()
        if _can_be_split(modules[name], linears, degree)
    }


def _attentions(modules: Mapping[str, nn.Module]) -> Mapping[str, _Attention]:
    by_parent: defaultdict[str, _Attention] = defaultdict(_Attention)
    plans = list(_plans(modules))
    for path, module in modules.items():
        if type(module) is nn.Linear:
            styles = {plan[key] for plan in plans for key in plan if _matches(key, path)}
            parent, _, own = path.rpartition(".")
            if styles == {_COLUMN}:
                by_parent[parent].columns.append(own)
            elif styles == {_ROW}:
                by_parent[parent].rows.append(own)
    return {
        name: each
        for name, each in by_parent.items()
        if len(each.rows) == 1 and each.columns and isinstance(_head_dim(modules[name]), int)
    }


def _plans(modules: Mapping[str, nn.Module]) -> Iterator[Mapping[str, str]]:
    seen: set[int] = set()
    for module in modules.values():
        plan = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if isinstance(plan, Mapping) and id(plan) not in seen:
            seen.add(id(plan))
            yield plan


def _matches(pattern: str, path: str) -> bool:
    general = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{path}")
    return general.endswith(f".{pattern}")


def _head_dim(attention: nn.Module) -> object:
    return getattr(attention, "head_dim", None)


def _can_be_split(attention: nn.Module, linears: _Attention, degree: int) -> bool:
    head_dim = _head_dim(attention)
    assert isinstance(head_dim, int)
    modules = {name: attention.get_submodule(name) for name in (*linears.columns, *linears.rows)}
    own = {id(p) for module in modules.values() for p in module.parameters()}
    if any(id(p) not in own for p in attention.parameters()) or list(attention.buffers()):
        return False
    config = getattr(attention, "config", None)
    if getattr(attention, "attention_dropout", 0.0) or getattr(config, "output_attentions", False):
        return False
    widths = {name: modules[name].out_features for name in linears.columns}
    whole = all(
        isinstance(width, int) and width % (head_dim * degree) == 0 for width in widths.values()
    )
    return whole and modules[linears.rows[0]].in_features == max(widths.values())  # type: ignore[type-var]
