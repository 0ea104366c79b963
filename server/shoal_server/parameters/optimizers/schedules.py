"""Learning rates that change with the number of updates, as in `torch.optim.lr_scheduler`.

torch computes most rates from the previous rate. To get equal rates to the last bit, the rate is
stored and advanced with each update. The rate is part of the shard's state: otherwise a backup
would have to repeat all updates to know it.
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
        """`schedule` has passed `check_schedule`. Without phases the rate stays `base_lr`."""
        phases = ((phase.num_updates, running(phase)) for phase in schedule.phases)
        self._phases = [(lasts, phase) for lasts, phase in phases if phase is not None]
        self._base = base_lr
        first = self._phases[0][1].opening(base_lr) if self._phases else base_lr
        self._lr = torch.tensor([first], dtype=torch.float64)

    @property
    def lr(self) -> float:
        """The rate of the next update."""
        return float(self._lr[0]) if self._phases else self._base

    def advance(self, num_updates: int) -> None:
        """Set the rate of the next update, after `num_updates` updates of the shard. Call this
        after each update: most rates follow from the previous rate."""
        if not self._phases:
            return
        since = num_updates
        index = 0
        while index < len(self._phases) - 1 and since >= self._phases[index][0]:
            since -= self._phases[index][0]
            index += 1
        phase = self._phases[index][1]
        self._lr[0] = (
            phase.following(since, self._base, self.lr) if since else phase.first_rate(self._base)
        )

    def state(self) -> Mapping[str, Tensor]:
        """Return the state, not copied."""
        return {"lr": self._lr} if self._phases else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state` returned. Raises InternalError if `copy_state` does."""
        copy_state(self.state(), state)


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidSpec if torch would refuse the schedule, if a setting could make a rate negative
    or not finite, if a phase before the last has no updates, or if there are too many phases or
    milestones."""
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
