"""Learning rates that change with the number of updates, as those of `torch.optim.lr_scheduler`.

torch computes most of them from the one before, so they are more than a function of the number: to
have its very bits, the rate is kept and moved along with each update. It is part of the shard's
state, or a copy would have to go through all updates again.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.optimizer_pb2 import Schedule
from shoal_server.parameters.optimizers.phases import running
from shoal_server.parameters.optimizers.tensors import copy_state

MAX_PHASES = 64


class RunningSchedule:
    """The learning rate of one shard, from update to update."""

    def __init__(self, schedule: Schedule, base_lr: float) -> None:
        """`check_schedule` has passed. Without phases the rate stays `base_lr`."""
        found = ((phase.num_updates, running(phase)) for phase in schedule.phases)
        self._phases = [(lasts, phase) for lasts, phase in found if phase is not None]
        self._base = base_lr
        first = self._phases[0][1].opening(base_lr) if self._phases else base_lr
        self._lr = torch.tensor([first], dtype=torch.float64)

    @property
    def lr(self) -> float:
        """Of the next update."""
        return float(self._lr[0]) if self._phases else self._base

    def advance(self, num_updates: int) -> None:
        """So many updates have been applied now: one more than at the last call."""
        if not self._phases:
            return
        since = num_updates
        index = 0
        while index < len(self._phases) - 1 and since >= self._phases[index][0]:
            since -= self._phases[index][0]
            index += 1
        phase = self._phases[index][1]
        self._lr[0] = (
            phase.following(since, self._base, self.lr) if since else phase.taking_over(self._base)
        )

    def state(self) -> Mapping[str, Tensor]:
        """Not copied."""
        return {"lr": self._lr} if self._phases else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave. Raises InternalError if that was another schedule's."""
        copy_state(self.state(), state)


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidSpec for one that torch would refuse, or that gives no rate from 0 up."""
    if len(schedule.phases) > MAX_PHASES:
        raise InvalidSpec(
            "the schedule is too long",
            seen=f"{len(schedule.phases)} phases",
            expected=f"at most {MAX_PHASES}",
        )
    for index, phase in enumerate(schedule.phases):
        kind = running(phase)
        expected = "a kind of phase" if kind is None else kind.expected()
        if not expected and phase.num_updates == 0 and index < len(schedule.phases) - 1:
            expected = "a number of updates for each phase but the last"
        if expected:
            raise InvalidSpec(
                f"phase {index} of the schedule is out of range",
                seen=" ".join(str(phase).split())[:200] or "nothing",
                expected=expected,
            )
