"""What the stages of a pipeline hold and send, from shapes alone."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.layouts.outline import Outline
from shoal.layouts.pipeline import Course
from shoal.layouts.schedules import Feed, num_microbatches
from shoal.layouts.stages import Stage
from shoal.planning.figures import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Collective,
    GroupFigures,
    Plan,
    RankFigures,
    Subject,
)

LOSS_BYTES = torch.float64.itemsize
"""The last stage tells the others the loss."""


class PipelineFigures:
    """Computes one plan. What goes from stage to stage is known only if the inputs are."""

    def __init__(
        self, subject: Subject, cut: tuple[Outline, Sequence[int]], course: Course
    ) -> None:
        self._subject = subject
        self._outline, self._stage_of = cut
        model = on_meta(subject.model)
        self._stages = [
            Stage(copy.deepcopy(model), *cut, index) for index in range(subject.world_size)
        ]
        self._count = 0
        self._crossing: list[list[Tensor]] = []
        if subject.inputs is not None:
            feed = Feed(inputs=self._stages[0].bind((_to_meta(subject.inputs),), {}))
            self._count = num_microbatches(feed.num_samples, course.microbatches)
            self._crossing = self._passed_on(feed)

    def plan(self, strategy: str, notes: tuple[str, ...] = ()) -> Plan:
        if self._subject.inputs is None:
            notes += ("without inputs, what goes from stage to stage is not counted",)
        return Plan(
            strategy=strategy,
            groups=tuple(map(self._group, self._stages)),
            ranks=tuple(map(self._rank, self._stages)),
            notes=(*notes, "a batch's first step also sends its shapes, which are not counted"),
        )

    def _passed_on(self, feed: Feed) -> list[list[Tensor]]:
        """For each stage but the last what it hands to the next, for one micro-batch."""
        inputs = feed.samples(dict(feed.inputs), 0, feed.num_samples // self._count)
        passed: Any = ()
        found = []
        for stage in self._stages[:-1]:
            passed = [t.detach().requires_grad_(t.requires_grad) for t in passed]
            passed = stage.run(inputs, passed)
            found.append(list(passed))
        return found

    def _group(self, stage: Stage) -> GroupFigures:
        parameters = stage.parameters
        pairs = zip(self._outline.segments, self._stage_of, strict=True)
        names = [segment.name for segment, index in pairs if index == stage.index]
        return GroupFigures(
            title=f"stage {stage.index}: {names[0]}" + (f" to {names[-1]}" if names[1:] else ""),
            num_parameters=len(parameters),
            num_bytes=_bytes(parameters.values()),
        )

    def _rank(self, stage: Stage) -> RankFigures:
        parameters = stage.parameters
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        held, gradients = _bytes(parameters.values()), _bytes(trained.values())
        return RankFigures(
            parameters=held,
            parameters_peak=held,
            gradients=gradients,
            gradients_peak=gradients,
            optimizer=self._subject.state_bytes({n: tuple(p.shape) for n, p in parameters.items()}),
            collectives=tuple(each for each in self._collectives(stage, trained) if each.num_bytes),
        )

    def _collectives(
        self, stage: Stage, trained: Mapping[str, nn.Parameter]
    ) -> Iterable[Collective]:
        before = self._crossing[stage.index - 1] if self._crossing and stage.index else []
        behind = self._crossing[stage.index : stage.index + 1]
        outputs = behind[0] if behind else []
        yield self._messages("recv", FORWARD, before)
        yield self._messages("send", FORWARD, outputs)
        yield self._messages("recv", BACKWARD, [t for t in outputs if t.requires_grad])
        yield self._messages("send", BACKWARD, [t for t in before if t.requires_grad])
        yield Collective(kind="broadcast", when=UPDATE, calls=1, num_bytes=LOSS_BYTES)
        shared = [
            (p.numel() + 1) * p.element_size()
            for name, p in trained.items()
            for _ in stage.holders[name][1:]
        ]
        for kind in ("send", "recv"):
            yield Collective(kind=kind, when=UPDATE, calls=len(shared), num_bytes=sum(shared))

    def _messages(self, kind: str, when: str, tensors: Sequence[Tensor]) -> Collective:
        return Collective(
            kind=kind,
            when=when,
            calls=self._count * len(tensors),
            num_bytes=self._count * _bytes(tensors),
        )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without any memory."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo).to("meta")


def _to_meta(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


__all__ = ["PipelineFigures", "on_meta"]
