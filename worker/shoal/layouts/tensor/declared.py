"""Attention whose model says itself how it is split: the plans that Hugging Face's models carry.

Their `config.base_model_tp_plan` names linear modules that are cut by outputs ("colwise") and by
inputs ("rowwise") with nothing gathered between: what the attention computes then from some heads
is what it would compute of them. So it is promised by the model's authors, where a forward that
takes `**kwargs` cannot be followed.
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
    """The linear modules of one parent that a plan names, by name in it."""

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


def declared_regions(model: nn.Module, degree: int) -> Mapping[str, Region]:
    """Attention that can be split by whole heads over `degree` ranks, by the module's name.

    Left out, and so split module by module with gathered outputs: heads, or heads of keys and
    values, that do not divide by `degree`; dropout on the attention's weights, which would draw
    other masks than one process; parameters or buffers beside those of the linear modules (their
    gradients would be of some heads only); weights of attention that are shown as outputs.
    """
    modules = dict(model.named_modules())
    return {
        name: Region(columns=tuple(sorted(found.columns)), row=found.rows[0], dropouts=())
        for name, found in _attentions(modules).items()
        if _divides(modules[name], found, degree)
    }


def _attentions(modules: Mapping[str, nn.Module]) -> Mapping[str, _Attention]:
    found: defaultdict[str, _Attention] = defaultdict(_Attention)
    plans = list(_plans(modules))
    for path, module in modules.items():
        if type(module) is nn.Linear:
            styles = {plan[key] for plan in plans for key in plan if _matches(key, path)}
            parent, _, own = path.rpartition(".")
            if styles == {_COLUMN}:
                found[parent].columns.append(own)
            elif styles == {_ROW}:
                found[parent].rows.append(own)
    return {
        name: each
        for name, each in found.items()
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
    """Patterns have "*" for the numbers of blocks, and begin below the model with a head."""
    general = re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{path}")
    return general.endswith(f".{pattern}")


def _head_dim(attention: nn.Module) -> object:
    return getattr(attention, "head_dim", None)


def _divides(attention: nn.Module, found: _Attention, degree: int) -> bool:
    head_dim = _head_dim(attention)
    assert isinstance(head_dim, int)
    linear = {name: attention.get_submodule(name) for name in (*found.columns, *found.rows)}
    own = {id(p) for module in linear.values() for p in module.parameters()}
    if any(id(p) not in own for p in attention.parameters()) or list(attention.buffers()):
        return False
    config = getattr(attention, "config", None)
    if getattr(attention, "attention_dropout", 0.0) or getattr(config, "output_attentions", False):
        return False
    widths = {name: linear[name].out_features for name in found.columns}
    whole = all(
        isinstance(width, int) and width % (head_dim * degree) == 0 for width in widths.values()
    )
    return whole and linear[found.rows[0]].in_features == max(widths.values())  # type: ignore[type-var]
