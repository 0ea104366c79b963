"""Derivation of a tensor plan for a transformer, or any model of linear and embedding modules.
Modules are split only if the result is correct for every use of them. All else stays whole, and the
plan says why."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shoal.layouts.tensor.declared import declared_regions
from shoal.layouts.tensor.plan import (
    COLUMN,
    HEADS,
    MASK,
    ROW,
    VOCAB,
    WHOLE,
    ParameterSplit,
    PlanEntry,
    TensorPlan,
)
from shoal.layouts.tensor.regions import regions
from shoal.layouts.tensor.sequence_blocks import sequence_blocks
from shoal.layouts.tensor.styles import CUT_DIMS, STYLES, reason_to_keep_whole
from shoal.torch_private.modules import parameter_table
from shoal_proto.errors import InvalidSpec

MIN_SPLIT_BYTES = 64 * 1024
"""Minimum size of a split module or pair: for smaller ones, collectives cost more than they
save."""


def derive(
    model: nn.Module,
    degree: int,
    overrides: Mapping[str, str] | None = None,
    *,
    min_split_bytes: int = MIN_SPLIT_BYTES,
    sequence: bool = False,
    all_have_parts: bool = False,
) -> TensorPlan:
    """Derive a plan that splits the model, which may be on the meta device, over `degree` ranks.

    `overrides` maps shell patterns of module names to "column", "row", "vocab", "heads" or "whole",
    in any combination; the last match counts. `sequence`: also find blocks in which each rank
    computes only its positions. `all_have_parts`: leave modules whole if a rank would get nothing
    of them.

    Raises InvalidSpec if a pattern matches nothing, if a style does not fit its module, if an
    override splits fewer elements than there are ranks, or heads that do not divide by `degree`,
    and if tied weights would be cut in two ways.
    """
    if degree < 1:
        raise InvalidSpec("a model cannot be split", seen=f"degree {degree}", expected="1 or more")
    derivation = _Derivation(
        model, degree, overrides or {}, min_split_bytes, all_have_parts=all_have_parts
    )
    plan = derivation.plan()
    if not sequence or degree == 1:
        return plan
    return replace(plan, sequence=sequence_blocks(model, {e.module: e for e in plan.entries}))


class _Derivation:
    def __init__(
        self,
        model: nn.Module,
        degree: int,
        overrides: Mapping[str, str],
        min_split_bytes: int,
        *,
        all_have_parts: bool,
    ) -> None:
        self._all_have_parts = all_have_parts
        self._modules = dict(model.named_modules())
        self._degree = degree
        self._min_bytes = min_split_bytes
        paths = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self._shared = {name for name, m in self._modules.items() if paths[id(m)] > 1}
        self._owners = _owners(self._modules)
        self._declared = declared_regions(model, degree)
        self._chosen = self._read(overrides)
        self._entries: dict[str, PlanEntry] = {}
        self._counted: set[int] = set()

    def plan(self) -> TensorPlan:
        for name, reason in self._unsplittable():
            self._whole(name, reason)
        self._tied()
        if self._degree > 1:
            for name in self._modules:
                self._pairs(name)
        for name, module in self._modules.items():
            if name not in self._entries and type(module) in STYLES:
                self._alone(name)
        ordered = [self._entries[name] for name in self._modules if name in self._entries]
        return TensorPlan(degree=self._degree, entries=tuple(self._count(e) for e in ordered))

    # --- overrides of the user ---

    def _read(self, overrides: Mapping[str, str]) -> dict[str, str]:
        chosen: dict[str, str] = {}
        for pattern, style in overrides.items():
            matches = [name for name in self._modules if fnmatchcase(name, pattern)]
            if not matches:
                raise InvalidSpec(
                    "the tensor plan names a module that the model does not have",
                    seen=repr(pattern),
                    expected="a name or pattern of named_modules()",
                    fix=f"The model has {', '.join(name for name in self._modules if name)}.",
                )
            for name in matches:
                if style == WHOLE:
                    below = f"{name}." if name else ""
                    chosen |= {inner: WHOLE for inner in self._modules if inner.startswith(below)}
                else:
                    self._check_fit(name, style)
                chosen[name] = style
        return chosen

    def _check_fit(self, name: str, style: str) -> None:
        module = self._modules[name]
        fitting = STYLES.get(type(module), ())
        if style not in fitting:
            raise InvalidSpec(
                f"the tensor plan does not fit module {name!r}, a {type(module).__name__}",
                seen=repr(style),
                expected=" or ".join(repr(known) for known in (*fitting, WHOLE)),
            )
        reason = reason_to_keep_whole(module) or self._too_small(module, style)
        if reason:
            raise InvalidSpec(
                f"module {name!r} cannot be split over {self._degree} ranks",
                seen=reason,
                expected="a module with a part for each rank",
                fix="Use 'whole', or leave the module out of the plan.",
            )

    # --- modules that cannot be split, and tied modules ---

    def _unsplittable(self) -> Iterator[tuple[str, str]]:
        for name, module in self._modules.items():
            if self._chosen.get(name) == WHOLE:
                yield name, "as given"
            elif type(module) not in STYLES:
                yield name, f"a {type(module).__name__} cannot be split"
            elif reason := reason_to_keep_whole(module):
                yield name, reason

    def _tied(self) -> None:
        """Decide on modules that share parameters: all are cut by rows, or all are whole."""
        for names in self._bound_together():
            styles = {name: self._tied_style(name) for name in names}
            bad = [n for n, s in styles.items() if self._chosen.get(n, s) not in (s, WHOLE)]
            if bad:
                raise InvalidSpec(
                    f"the weights of {' and '.join(names)} are tied: they must be cut alike",
                    seen=f"{bad[0]!r}: {self._chosen[bad[0]]!r}",
                    expected="'vocab' for embeddings and 'column' for linear modules, or 'whole'",
                )
            splits = all(
                styles[n] and n not in self._entries and self._fits(n, styles[n]) for n in names
            )
            # Decide for all names: else a tensor would be cut in one module and whole in another.
            splits = splits and any(self._is_big(name) for name in names)
            for name in names:
                others = ", ".join(other for other in names if other != name)
                if splits:
                    self._split(name, styles[name], f"tied to {others}: all by rows")
                elif name not in self._entries:
                    self._whole(name, f"tied to {others}, which cannot be cut in the same way")

    def _bound_together(self) -> Iterator[list[str]]:
        """Yield lists of modules that must be cut alike: those with a parameter in common, directly
        or through a third module."""
        groups = {name: {name} for name in self._modules}
        for owners in self._owners.values():
            joint = set().union(*(groups[self._cutter(name)] for name, _ in owners))
            groups |= dict.fromkeys(joint, joint)
        seen: set[str] = set()
        for name, group in groups.items():
            if len(group) > 1 and name not in seen:
                seen |= group
                yield [each for each in self._modules if each in group]

    def _cutter(self, name: str) -> str:
        """Return the module whose split decides how this module is cut: for an attention's
        `out_proj` the attention, else the module itself."""
        parent, _, own = name.rpartition(".")
        above = self._modules.get(parent) if own == "out_proj" else None
        return parent if isinstance(above, nn.MultiheadAttention) else name

    def _tied_style(self, name: str) -> str:
        return {nn.Embedding: VOCAB, nn.Linear: COLUMN}.get(type(self._modules[name]), "")

    # --- pairs and single modules ---

    def _pairs(self, parent: str) -> None:
        if parent in self._shared and not self._modules[parent]._modules:
            return
        prefix = f"{parent}." if parent else ""
        declared = self._declared.get(parent)
        for region in [declared] if declared else regions(self._modules[parent]):
            columns = [prefix + name for name in region.columns]
            row, masks = prefix + region.row, [prefix + name for name in region.dropouts]
            if not (
                self._can_be_paired(row, ROW)
                and all(self._can_be_paired(name, COLUMN) for name in columns)
            ):
                continue
            if not all(self._has_one_name(name) for name in masks):
                continue
            weights = (self._modules[name].weight for name in (*columns, row))
            num_bytes = sum(w.nbytes for w in weights if isinstance(w, Tensor))
            is_override = any(name in self._chosen for name in (*columns, row))
            if num_bytes < self._min_bytes and not is_override:
                continue
            for name in columns:
                self._split(name, COLUMN, f"its outputs go on to {row}", paired=True)
            why = f"takes the parts of {', '.join(columns)}"
            self._split(row, ROW, why, paired=True)
            width = self._modules[row].in_features
            assert isinstance(width, int)
            for name in masks:
                self._entries[name] = PlanEntry(
                    module=name, style=MASK, why=f"before {row}", parts={}, width=width
                )

    def _can_be_paired(self, name: str, style: str) -> bool:
        return (
            name not in self._entries
            and self._has_one_name(name)
            and self._chosen.get(name, style) == style
            and self._fits(name, style)
        )

    def _has_one_name(self, name: str) -> bool:
        return name in self._modules and name not in self._shared

    def _alone(self, name: str) -> None:
        module = self._modules[name]
        override = self._chosen.get(name)
        style = override or STYLES[type(module)][0]
        reason = self._too_small(module, style)
        if self._degree == 1:
            self._whole(name, "there is one rank")
        elif reason:
            self._whole(name, reason)
        elif not override and not self._is_big(name):
            self._whole(name, f"smaller than {self._min_bytes} bytes")
        elif style == HEADS:
            self._split(name, style, "each rank has whole heads")
        elif style == ROW:
            self._split(name, style, "takes its part of whole inputs; outputs are summed")
        elif style == VOCAB:
            self._split(name, style, "each rank looks up its own rows; outputs are summed")
        else:
            self._split(name, style, "on its own: outputs are gathered")

    def _is_big(self, name: str) -> bool:
        count = sum(p.nbytes for p in self._modules[name].parameters())
        return name in self._chosen or count >= self._min_bytes

    def _fits(self, name: str, style: str) -> bool:
        return not self._too_small(self._modules[name], style)

    def _too_small(self, module: nn.Module, style: str) -> str:
        """Return the reason why a dimension is too small for the ranks; empty if it is not."""
        if isinstance(module, nn.MultiheadAttention):
            if module.num_heads % self._degree:
                return f"{module.num_heads} heads do not divide by {self._degree}"
            return ""
        weight = module.weight
        assert isinstance(weight, Tensor)
        size = weight.shape[CUT_DIMS[type(module), style]["weight"]]
        if size < self._degree:
            return f"{size} is fewer than {self._degree} ranks"
        has_last = size > (self._degree - 1) * -(-size // self._degree)
        lacks = self._all_have_parts and not has_last
        return f"{size} elements leave one of {self._degree} ranks without a part" if lacks else ""

    # --- entries of the plan ---

    def _split(self, name: str, style: str, why: str, *, paired: bool = False) -> None:
        dims = CUT_DIMS[type(self._modules[name]), style]
        self._entries[name] = self._entry(name, style, why, dims, paired=paired)
        if style == HEADS:
            self._entries.pop(_under(name, "out_proj"), None)

    def _whole(self, name: str, why: str) -> None:
        module = self._modules[name]
        if any(parameter is not None for parameter in parameter_table(module).values()):
            self._entries[name] = self._entry(name, WHOLE, why, {})

    def _entry(
        self, name: str, style: str, why: str, dims: Mapping[str, int], *, paired: bool = False
    ) -> PlanEntry:
        module = self._modules[name]
        held = dict(module.named_parameters(recurse=style == HEADS))
        parts = {
            key: ParameterSplit(
                shape=tuple(p.shape), dim=dims.get(key), element_bytes=p.element_size()
            )
            for key, p in held.items()
        }
        return PlanEntry(module=name, style=style, paired=paired, why=why, parts=parts)

    def _count(self, entry: PlanEntry) -> PlanEntry:
        """Return the entry without the parameters that were counted for an earlier entry."""
        module = self._modules[entry.module]
        parts = {}
        for key, part in entry.parts.items():
            parameter = module.get_parameter(key)
            if id(parameter) not in self._counted:
                self._counted.add(id(parameter))
                parts[key] = part
        return PlanEntry(
            module=entry.module,
            style=entry.style,
            paired=entry.paired,
            why=entry.why,
            parts=parts,
            width=entry.width,
        )


def _owners(modules: Mapping[str, nn.Module]) -> dict[int, list[tuple[str, str]]]:
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, module in modules.items():
        for key, parameter in parameter_table(module).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, key))
    return owners


def _under(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name
