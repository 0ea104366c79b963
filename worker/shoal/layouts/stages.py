"""Which layers are whose: a model cut into stages of nearly the same cost.

Every rank cuts by itself and all must cut alike, so each choice here is a function of the model,
the number of stages and the costs alone.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from shoal.layouts.outline import Outline, Segment, is_used, uses_of
from shoal_proto.errors import InvalidSpec


def balanced(costs: Sequence[int], num_stages: int) -> list[int]:
    """The stage of each layer, such that the costliest stage is as cheap as can be.

    Stages are runs of neighbours, none is empty. Costs are whole numbers of at least 0, there are
    no fewer of them than stages. Where there is a choice the earlier stages are the fuller ones.
    """
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_runs(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    stage_of: list[int] = []
    stage, room = 0, low
    for index, cost in enumerate(costs):
        stages_left, layers_left = num_stages - 1 - stage, len(costs) - index
        if index and (cost > room or layers_left == stages_left):
            stage, room = stage + 1, low
        stage_of.append(stage)
        room -= cost
    return stage_of


def _num_runs(costs: Sequence[int], at_most: int) -> int:
    runs, room = 1, at_most
    for cost in costs:
        if cost > room:
            runs, room = runs + 1, at_most
        room -= cost
    return runs


class Cutter:
    """Cuts a model into any number of stages; keeps the traces, which serve all generations.

    `split_at` names the layers before which it may be cut; None: before any. A model with fewer
    layers than stages is opened further: its largest layers are cut up in turn.
    """

    def __init__(self, split_at: Sequence[str] | None = None) -> None:
        self._split_at = None if split_at is None else tuple(split_at)
        self._outlines: list[Outline] = []
        self._closed: set[str] = set()

    def outline(self, model: nn.Module, num_stages: int) -> Outline:
        """The coarsest outline that has so many stages. Raises InvalidSpec if there is none."""
        if not self._outlines:
            self._outlines.append(Outline(model, _opened_first(model, self._split_at or ())))
        for outline in self._outlines:
            if self._num_parts(outline) >= num_stages:
                return outline
        while self._split_at is None:
            finer = self._opened_once_more(model, self._outlines[-1])
            if finer is None:
                break
            self._outlines.append(finer)
            if len(finer.segments) >= num_stages:
                return finer
        raise self._too_few(self._outlines[-1], num_stages)

    def stage_of(
        self, outline: Outline, num_stages: int, costs: Sequence[int] | None = None
    ) -> list[int]:
        """The stage of each segment; `costs` are those of the segments, None: their bytes."""
        costs = [segment.num_bytes for segment in outline.segments] if costs is None else costs
        starts = self._starts(outline)
        runs = [0] * len(starts)
        part_of = []
        for index, cost in enumerate(costs):
            part_of.append(sum(start <= index for start in starts) - 1)
            runs[part_of[-1]] += cost
        stage_of_part = balanced(runs, num_stages)
        return [stage_of_part[part] for part in part_of]

    def _starts(self, outline: Outline) -> list[int]:
        """The segments that a stage may begin with."""
        names = [segment.name for segment in outline.segments]
        if self._split_at is None:
            return list(range(len(names)))
        starts = [0]
        for cut in self._split_at:
            found = [i for i, name in enumerate(names) if name == cut or name.startswith(cut + ".")]
            if not found:
                raise InvalidSpec(
                    f"the model cannot be cut before {cut!r}",
                    seen=f"split_at={list(self._split_at)}",
                    expected=f"names among {_some(names)}",
                )
            starts.append(found[0])
        return sorted(set(starts))

    def _num_parts(self, outline: Outline) -> int:
        return len(self._starts(outline))

    def _opened_once_more(self, model: nn.Module, outline: Outline) -> Outline | None:
        """The same with the largest layer that can be opened opened."""
        names = {segment.name.partition("@")[0]: segment for segment in outline.segments}
        by_size = sorted(names.items(), key=lambda item: -item[1].num_bytes)
        for name, _ in by_size:
            if name in self._closed or not _has_layers(model.get_submodule(name)):
                continue
            self._closed.add(name)
            try:
                finer = Outline(model, outline.opened | {name})
            except InvalidSpec:
                continue  # Its own forward pass cannot be traced: it stays one layer.
            if len(finer.segments) >= len(outline.segments):
                return finer
        return None

    def _too_few(self, outline: Outline, num_stages: int) -> InvalidSpec:
        num_parts = self._num_parts(outline)
        return InvalidSpec(
            f"the model cannot be cut into {num_stages} stages",
            seen=f"{num_parts} layers that can be cut apart: {_some(_names(outline.segments))}"
            if self._split_at is None
            else f"{num_parts} parts by split_at={list(self._split_at)}",
            expected=f"at least one for each of {num_stages} ranks",
            fix=f"Train with at most {num_parts} ranks, or strategy 'hybrid', which gives the"
            " pipeline fewer.",
        )


def _opened_first(model: nn.Module, split_at: Collection[str]) -> set[str]:
    """Containers, what holds a list of layers, and what holds a layer named in `split_at`."""
    opened: set[str] = set()
    for name, part in model.named_modules():
        parent = name.rpartition(".")[0]
        if not name or (parent and parent not in opened):
            continue
        named = any(cut.startswith(name + ".") for cut in split_at)
        lists = any(isinstance(child, nn.ModuleList) for child in part.children())
        if named or lists or isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            opened.add(name)
    return opened


def _has_layers(part: nn.Module) -> bool:
    """Whether the user wrote its forward pass, over layers with parameters of their own."""
    if type(part).__module__.startswith("torch.nn"):
        return isinstance(part, nn.Sequential)
    return any(next(child.parameters(), None) is not None for child in part.children())


def _names(segments: Sequence[Segment]) -> list[str]:
    return [segment.name for segment in segments]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


class Stage:
    """One stage of a model: the user's module without what others hold, and what to run of it."""

    def __init__(self, model: nn.Module, outline: Outline, stage_of: Sequence[int], index: int):
        """Takes the model as its own and drops from it what this stage does not need.

        What no stage uses stays with the first. Raises InvalidSpec for a module with buffers of
        its own that two stages call: each would go its own way.
        """
        self.index, self.num_stages = index, stage_of[-1] + 1
        self.model = model
        self._graphs = {mode: outline.graph(mode, stage_of, index) for mode in (True, False)}
        self._runs: dict[bool, fx.Interpreter] = {}
        self._inputs = outline.parameters
        uses = [
            uses_of(outline.graph(True, stage_of, stage))
            | uses_of(outline.graph(False, stage_of, stage))
            for stage in range(self.num_stages)
        ]
        self.holders = _holders(model, uses)
        """The stages that hold a parameter or persistent buffer, by its name in the user's
        model."""
        _refuse_shared_buffers(model, uses)
        own = uses[index] | (_unused(model, uses) if index == 0 else set())
        self.names = _own_names(model, own)
        _prune(model, own)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of this stage as they are now, by their names in the user's model."""
        return {
            self.names[name]: parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    def run(self, inputs: Mapping[str, Any], activations: Sequence[Tensor]) -> Any:
        """This stage of a forward pass: a tuple for the next stage, or the model's outputs."""
        mode = self.model.training
        if mode not in self._runs:
            self._runs[mode] = fx.Interpreter(self.model, graph=self._graphs[mode])
            self._runs[mode].extra_traceback = False
        return self._runs[mode].run(*inputs.values(), *activations)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's inputs by name, as `run` takes them, of what it is called with.

        Raises InvalidSpec for a value other than the default, where the trace stands on that.
        """
        bound = inspect.signature(self.model.forward).bind(*args, **kwargs).arguments
        given = {}
        for name, default in self._inputs.items():
            if default is inspect.Parameter.empty:
                given[name] = bound.pop(name)
            elif name in bound and bound[name] is not default and bound[name] != default:
                raise InvalidSpec(
                    f"the pipeline was laid out for {name}={default!r}",
                    seen=f"another value for {name}",
                    expected="values for the first input and for those without a default only",
                )
        return given


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under every name that they have."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _stages_of(tensor: str, uses: Sequence[Collection[str]]) -> list[int]:
    return [stage for stage, used in enumerate(uses) if is_used(tensor, used)]


def _holders(model: nn.Module, uses: Sequence[Collection[str]]) -> dict[str, tuple[int, ...]]:
    canonical = _canonical(model)
    found: dict[str, set[int]] = {}
    for name, _ in _tensors(model):
        found.setdefault(canonical[name], set()).update(_stages_of(name, uses))
    return {name: tuple(sorted(stages)) or (0,) for name, stages in found.items()}


def _unused(model: nn.Module, uses: Sequence[Collection[str]]) -> set[str]:
    canonical = _canonical(model)
    used = {canonical[name] for name, _ in _tensors(model) if _stages_of(name, uses)}
    return {name for name in canonical.values() if name not in used}


def _canonical(model: nn.Module) -> dict[str, str]:
    """For each name of a tensor the one that the user's model lists it under."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    return {name: first.get(tensor, name) for name, tensor in _tensors(model)}  # type: ignore[call-overload]


def _own_names(model: nn.Module, own: Collection[str]) -> dict[str, str]:
    return {name: known for name, known in _canonical(model).items() if is_used(name, own)}


def _refuse_shared_buffers(model: nn.Module, uses: Sequence[Collection[str]]) -> None:
    for name, part in model.named_modules():
        for buffer in part._buffers:
            calls = [name in used for used in uses]
            if sum(calls) > 1 and buffer not in part._non_persistent_buffers_set:
                raise InvalidSpec(
                    f"{name} is called by more than one stage and keeps a buffer",
                    seen=f"{name}.{buffer}",
                    expected="a layer with buffers, such as BatchNorm, in one stage only",
                    fix="Give each place a layer of its own.",
                )


def _prune(model: nn.Module, own: Collection[str]) -> None:
    paths = list(model.named_modules(remove_duplicate=False))
    kept = {
        (part, name)
        for path, part in paths
        for name in (*part._parameters, *part._buffers)
        if is_used(f"{path}.{name}" if path else name, own)
    }
    for part in model.modules():
        for table in (part._parameters, part._buffers):
            for name in table:
                if (part, name) not in kept:
                    table[name] = None
    for path, _ in reversed(paths):
        parent, _, name = path.rpartition(".")
        if path and not is_used(path, own) and not any(u.startswith(path + ".") for u in own):
            del model.get_submodule(parent)._modules[name]


__all__ = ["Cutter", "Stage", "balanced"]
