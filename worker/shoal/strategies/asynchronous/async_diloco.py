"""The strategy `async-diloco`: members step alone for a round, then push their change.

The parameter servers take the outer step of DiLoCo (Douillard et al. 2023, arXiv:2311.08105) for
each member's round as it arrives (as in Liu et al. 2024, "Asynchronous Local-SGD Training for
Language Modeling", arXiv:2401.09135).

A round's samples count once its push is acknowledged. If a member is lost, or ends with an error,
other members train on the samples since its last push again. A member that drains, or whose loop
without `session.batches` ends, pushes its round first.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.compression.base import Compression
from shoal.model.elementwise_optimizers import refuse_lbfgs
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal.strategies.asynchronous.gradients import gradients_of
from shoal.strategies.outer_step import OuterStep
from shoal_proto.errors import InvalidSpec, StalePush
from shoal_proto.numbers_given import as_index
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec

KINDS = ("damp", "none", "scale")


class AsyncDiLoCo(AsyncSGD):
    """Strategy "async-diloco": members step alone for a round, then push their change.

    A member's optimizer may be any of torch's except LBFGS.
    """

    name: ClassVar[str] = "async-diloco"
    pushes_rows: ClassVar[bool] = False
    watch_counts: ClassVar[str] = "of this member's steps"

    def __init__(
        self,
        *,
        every_steps: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        staleness: str = "damp",
        compression: str | Compression | None = None,
    ) -> None:
        """A round has `every_steps` steps, or fewer if this member gets no further samples.

        `staleness`: the effect of rounds that other members have pushed meanwhile. "damp" slows the
        outer step down by their number, so that the settings of "diloco" suit several members.
        "scale" divides the rate by their number, if it is above 1. "none" ignores them: `outer_lr`
        and `outer_momentum` have to be chosen for the number of members. `compression`: as for
        `shoal.DiLoCo`.

        Raises InvalidSpec for values out of range.
        """
        if staleness not in KINDS:
            raise InvalidSpec(
                "no such treatment of stale rounds",
                seen=repr(staleness),
                expected=f"one of {', '.join(map(repr, KINDS))}",
            )
        every_steps = as_index("every_steps", every_steps)
        if every_steps < 1:
            raise InvalidSpec(
                "every_steps is out of range", seen=f"{every_steps}", expected="at least 1"
            )
        super().__init__(staleness=staleness, compression=compression)
        self._every_steps = every_steps
        self._outer = OuterStep(lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        self._steps_of_round = 0
        self._began: dict[str, Tensor] = {}
        self._unacknowledged: list[Callable[[], None]] = []

    def _servers_spec(self, optimizer: Optimizer) -> OptimizerSpec:
        refuse_lbfgs(self.name, optimizer)
        outer = HyperParameters(
            lr=self._outer.lr, momentum=self._outer.momentum, nesterov=self._outer.nesterov
        )
        return OptimizerSpec(kind="outer", groups=[outer] * len(optimizer.param_groups))

    def _own_fields(self) -> Mapping[str, str]:
        return {"rounds": f"{self._every_steps} steps, {self._outer}"}

    @property
    def schedule_option(self) -> str:
        """Empty: a member's own optimizer follows the script's schedule."""
        return ""

    @property
    def steps_per_round(self) -> int:
        return self._every_steps

    def _rates(self) -> list[float]:
        return []

    def begin_step(self) -> None:
        super().begin_step()
        if not self._began:
            self._began = {n: _on_host(p) for n, p in self._shared.values.parameters.items()}

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        # Raises for gradients that are not finite, before they reach the member's own values.
        gradients_of(self._shared.values.parameters, self._step)
        self._shared.optimizer.step()
        self._step += 1
        self._steps_of_round += 1
        self._unacknowledged.append(acknowledged)
        if self._steps_of_round == self._every_steps:
            self._end_round()
        self._watch_loss()

    def _watch_loss(self) -> None:
        # Checked by steps, not updates: a round is one update, and a run may have a few dozen.
        if self._losses is not None and self._losses.is_due(self._step):
            self._losses.judge_window(self._step)

    def _end_round(self) -> None:
        if not self._steps_of_round:
            return
        diff = {n: self._began[n] - _on_host(p) for n, p in self._shared.values.parameters.items()}
        result = self._push(diff, self._encode(diff))
        if result.stale:
            raise _round_refused(self._steps_of_round, result.stale)
        self._count(result)
        self._began, self._steps_of_round = {}, 0
        while self._unacknowledged:
            self._unacknowledged.pop(0)()

    def redoes(self, error: BaseException) -> bool:
        """False: a refused round is more than the step in progress."""
        return False

    def rest(self) -> None:
        # Other members wait for this member's samples, which count once its round is pushed.
        self._end_round()
        super().rest()

    def flush(self) -> None:
        self._end_round()

    def finish(self) -> None:
        self._end_round()
        super().finish()


def _round_refused(num_steps: int, stale: Mapping[int, StalePush]) -> StalePush:
    """Return the error for a round that began before the loss of these shards was accepted."""
    shards, refusal = ", ".join(map(str, sorted(stale))), next(iter(stale.values()))
    return StalePush(
        f"a round of {num_steps} steps began on values of shard {shards} that were lost meanwhile",
        seen=refusal.seen,
        expected=refusal.expected,
        fix="Start this worker again: it begins with the shards' present values, and the round's"
        " samples are trained on again.",
    )


def _on_host(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
