"""Learning rates that change with the number of updates, by torch's schedulers.

torch computes most rates from the previous one, so the rate is part of the shard's state: a backup
would otherwise have to repeat all updates.
"""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim.lr_scheduler import SequentialLR

from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.optimizer_pb2 import Schedule
from shoal_server.parameters.optimizers.phases import new_scheduler, range_error
from shoal_server.parameters.optimizers.tensors import copy_state

MAX_PHASES = 64


class RunningSchedule:
    def __init__(self, schedule: Schedule, base_lr: float) -> None:
        """`schedule` has passed `check_schedule`. Without phases the rate stays `base_lr`."""
        self._base = base_lr
        self._lr = torch.tensor([base_lr], dtype=torch.float64)
        self._running = _TorchSchedule(schedule, base_lr) if schedule.phases else None
        if self._running is not None:
            self._lr[0] = self._running.lr

    @property
    def lr(self) -> float:
        return float(self._lr[0]) if self._running is not None else self._base

    def advance(self, num_updates: int) -> None:
        """Set the rate of the next update, after `num_updates` updates. Call it after each update:
        most rates follow from the previous one."""
        if self._running is not None:
            self._lr[0] = self._running.following(num_updates, self.lr)

    def state(self) -> Mapping[str, Tensor]:
        return {"lr": self._lr} if self._running is not None else {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state(self.state(), state)


class _RateHolder(torch.optim.Optimizer):
    """An optimizer that updates nothing, whose rate torch's schedulers set.

    `Optimizer.__init__` is left out: it imports torch's compiler, which would stop the server for
    two seconds.
    """

    def __init__(self, lr: float) -> None:
        self.param_groups = [{"params": [], "lr": lr}]
        self.defaults: dict[str, object] = {}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


class _TorchSchedule:
    def __init__(self, schedule: Schedule, base_lr: float) -> None:
        optimizer = _RateHolder(base_lr)
        self._group = optimizer.param_groups[0]
        self._phases = [new_scheduler(phase, optimizer) for phase in schedule.phases]
        self._starts = list(accumulate(phase.num_updates for phase in schedule.phases[:-1]))
        self._sequence = SequentialLR(optimizer, self._phases, self._starts)
        # torch warns of schedulers that are stepped before their optimizer.
        optimizer.step()

    @property
    def lr(self) -> float:
        return float(self._group["lr"])

    def following(self, num_updates: int, lr: float) -> float:
        """The rate after `num_updates` (1 or more) updates. `lr`: the rate before the last of them,
        perhaps from another server's image."""
        before = num_updates - 1
        index = bisect_right(self._starts, before)
        self._sequence.last_epoch = before
        self._phases[index].last_epoch = before - (self._starts[index - 1] if index else 0)
        self._group["lr"] = lr
        self._sequence.step()
        return self.lr


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidSpec for a schedule that torch would refuse, a setting that is negative or not
    finite, a phase without updates that is not the last, or too many phases or milestones."""
    if len(schedule.phases) > MAX_PHASES:
        raise InvalidSpec(
            "the schedule is too long",
            seen=f"{len(schedule.phases)} phases",
            expected=f"at most {MAX_PHASES}",
        )
    for index, phase in enumerate(schedule.phases):
        expected = range_error(phase)
        if not expected and phase.num_updates == 0 and index < len(schedule.phases) - 1:
            expected = "a number of updates for each phase but the last"
        if expected:
            raise InvalidSpec(
                f"phase {index} of the schedule is out of range",
                seen=" ".join(str(phase).split())[:200] or "nothing",
                expected=expected,
            )
