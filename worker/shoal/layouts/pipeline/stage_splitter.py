"""Cut of a model into stages that cost nearly the same. The cut follows from the model, the number
of stages and the costs alone, so that every rank computes the same cut."""

from bisect import bisect_right
from collections.abc import Collection, Sequence

from torch import nn

from shoal.layouts.pipeline.outline import ModelSegment, Outline
from shoal_proto.errors import InvalidSpec
from shoal_proto.short_lists import short_list

MAX_NAMED = 12


def balanced(costs: Sequence[int], num_stages: int) -> list[int]:
    """Return the stage of each layer, with the costliest stage as cheap as possible.

    A stage is a run of consecutive layers; none is empty. `costs`: a non-negative integer for each
    layer, at least one for each stage. Among equal solutions, earlier stages get more layers.
    """
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_runs(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    stage_of: list[int] = []
    stage, budget = 0, low
    for index, cost in enumerate(costs):
        stages_left, layers_left = num_stages - 1 - stage, len(costs) - index
        if index and (cost > budget or layers_left == stages_left):
            stage, budget = stage + 1, low
        stage_of.append(stage)
        budget -= cost
    return stage_of


def _num_runs(costs: Sequence[int], at_most: int) -> int:
    runs, budget = 1, at_most
    for cost in costs:
        if cost > budget:
            runs, budget = runs + 1, at_most
        budget -= cost
    return runs


class StageSplitter:
    """Splitter of a model into any number of stages; keeps the traces for all generations.

    `split_at`: layers before which the model may be cut. None: before any layer; if these layers
    are too few, the largest ones are traced into.
    """

    def __init__(self, split_at: Sequence[str] | None = None) -> None:
        self._split_at = None if split_at is None else tuple(split_at)
        self._outlines: list[Outline] = []
        self._closed: set[str] = set()

    def outline(self, model: nn.Module, num_stages: int) -> Outline:
        """Return the coarsest outline with a part for each stage. Raises InvalidSpec if there is
        none, if the model cannot be traced, or if it lacks a layer of `split_at`."""
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
        """Return the stage of each segment. `costs`: cost of each segment; None: its bytes."""
        costs = [segment.num_bytes for segment in outline.segments] if costs is None else costs
        starts = self._starts(outline)
        runs = [0] * len(starts)
        part_of = []
        for index, cost in enumerate(costs):
            part_of.append(bisect_right(starts, index) - 1)
            runs[part_of[-1]] += cost
        stage_of_part = balanced(runs, num_stages)
        return [stage_of_part[part] for part in part_of]

    def _starts(self, outline: Outline) -> list[int]:
        """Return the indices of the segments that a stage may begin with. Raises what `outline`
        raises."""
        names = [segment.name for segment in outline.segments]
        if self._split_at is None:
            return list(range(len(names)))
        starts = [0]
        for cut in self._split_at:
            matches = [
                i for i, name in enumerate(names) if name == cut or name.startswith(cut + ".")
            ]
            if not matches:
                raise InvalidSpec(
                    f"the model cannot be cut before {cut!r}",
                    seen=f"split_at={list(self._split_at)}",
                    expected=f"names among {short_list(names, MAX_NAMED)}",
                )
            starts.append(matches[0])
        return sorted(set(starts))

    def _num_parts(self, outline: Outline) -> int:
        return len(self._starts(outline))

    def _opened_once_more(self, model: nn.Module, outline: Outline) -> Outline | None:
        """Return an outline that also traces into the largest layer possible; None if there is
        none."""
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
        layers = short_list(_names(outline.segments), MAX_NAMED)
        return InvalidSpec(
            f"the model cannot be cut into {num_stages} stages",
            seen=f"{num_parts} layers that can be cut apart: {layers}"
            if self._split_at is None
            else f"{num_parts} parts by split_at={list(self._split_at)}",
            expected=f"at least one for each of {num_stages} ranks",
            fix=f"Train with at most {num_parts} ranks, or use strategy 'hybrid', whose"
            " pipeline has fewer stages than ranks.",
        )


def _opened_first(model: nn.Module, split_at: Collection[str]) -> set[str]:
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
    if type(part).__module__.startswith("torch.nn"):
        return isinstance(part, nn.Sequential)
    return any(next(child.parameters(), None) is not None for child in part.children())


def _names(segments: Sequence[ModelSegment]) -> list[str]:
    return [segment.name for segment in segments]
