"""Learning rates of the server equal those of torch.optim.lr_scheduler, bit for bit."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.optimizer_pb2 import (
    ConstantPhase,
    CosinePhase,
    ExponentialPhase,
    LinearPhase,
    MultiStepPhase,
    Phase,
    Schedule,
    StepPhase,
)
from shoal_server.parameters.optimizers.schedules import (
    MAX_PHASES,
    RunningSchedule,
    check_schedule,
)

BASE = 0.3
NUM_UPDATES = 60

CONSTANT = Phase(constant=ConstantPhase(factor=0.3, total_iters=4))
AT_ONCE = Phase(constant=ConstantPhase(factor=0.3, total_iters=0))
LINEAR = Phase(linear=LinearPhase(start_factor=0.1, end_factor=0.9, total_iters=7))
STEP = Phase(step=StepPhase(step_size=3, gamma=0.7))
MULTI_STEP = Phase(multi_step=MultiStepPhase(milestones=[0, 2, 5, 5, 30], gamma=0.7))
EXPONENTIAL = Phase(exponential=ExponentialPhase(gamma=0.93))
COSINE = Phase(cosine=CosinePhase(t_max=11, eta_min=0.01))

Maker = Callable[[torch.optim.Optimizer], LRScheduler]
TORCH: dict[str, tuple[Phase, Maker]] = {
    "constant": (CONSTANT, lambda o: lr_scheduler.ConstantLR(o, 0.3, 4)),
    "at_once": (AT_ONCE, lambda o: lr_scheduler.ConstantLR(o, 0.3, 0)),
    "linear": (LINEAR, lambda o: lr_scheduler.LinearLR(o, 0.1, 0.9, 7)),
    "step": (STEP, lambda o: lr_scheduler.StepLR(o, 3, 0.7)),
    "multi_step": (MULTI_STEP, lambda o: lr_scheduler.MultiStepLR(o, [0, 2, 5, 5, 30], 0.7)),
    "exponential": (EXPONENTIAL, lambda o: lr_scheduler.ExponentialLR(o, 0.93)),
    "cosine": (COSINE, lambda o: lr_scheduler.CosineAnnealingLR(o, 11, 0.01)),
}


def rates_of_torch(make: Maker) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = make(optimizer)
    rates = []
    for _ in range(NUM_UPDATES):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def rates_of(schedule: Schedule) -> list[float]:
    check_schedule(schedule)
    running = RunningSchedule(schedule, BASE)
    rates = []
    for number in range(1, NUM_UPDATES + 1):
        rates.append(running.lr)
        running.advance(number)
    return rates


@pytest.mark.parametrize("kind", TORCH)
def test_the_rates_of_one_phase_equal_those_of_torch(kind: str) -> None:
    """Rates are compared beyond the end of a phase, and over several periods of a periodic one."""
    phase, make = TORCH[kind]
    assert rates_of(Schedule(phases=[phase])) == rates_of_torch(make)


@pytest.mark.parametrize("second", TORCH)
@pytest.mark.parametrize("first", TORCH)
def test_the_rates_of_several_phases_equal_those_of_torch(first: str, second: str) -> None:
    """Two phases, in any order, are followed by a third, as with SequentialLR."""
    phases = [TORCH[first], TORCH[second], TORCH["linear"]]
    schedule = Schedule(phases=[phase for phase, _ in phases])
    schedule.phases[0].num_updates, schedule.phases[1].num_updates = 9, 30

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        made = [make(optimizer) for _, make in phases]
        return lr_scheduler.SequentialLR(optimizer, made, [9, 39])

    assert rates_of(schedule) == rates_of_torch(make)


def test_without_a_schedule_the_rate_is_constant() -> None:
    """The shard has no state of it."""
    assert rates_of(Schedule()) == [BASE] * NUM_UPDATES
    assert RunningSchedule(Schedule(), BASE).state() == {}


def test_a_schedule_continues_from_its_state() -> None:
    """A copy made within a phase has the next rate of the whole schedule."""
    schedule = Schedule(phases=[EXPONENTIAL])
    running = RunningSchedule(schedule, BASE)
    for number in range(1, 21):
        running.advance(number)
    copy = RunningSchedule(schedule, BASE)
    copy.load_state({name: tensor.clone() for name, tensor in running.state().items()})
    copy.advance(21)
    assert copy.lr == rates_of(schedule)[21]


@pytest.mark.parametrize(
    ("phases", "fragment"),
    [
        ([Phase()], "a kind of phase"),
        ([Phase(constant=ConstantPhase(factor=0.0))], "0 < factor"),
        ([Phase(linear=LinearPhase(start_factor=2.0, total_iters=3))], "start_factor"),
        ([Phase(linear=LinearPhase(start_factor=0.5))], "total_iters"),
        ([Phase(step=StepPhase(gamma=0.5))], "step_size"),
        ([Phase(multi_step=MultiStepPhase(gamma=float("nan")))], "gamma"),
        ([Phase(exponential=ExponentialPhase(gamma=-1.0))], "gamma"),
        ([Phase(cosine=CosinePhase(t_max=0))], "t_max"),
        ([EXPONENTIAL, EXPONENTIAL], "a number of updates"),
        ([EXPONENTIAL] * (MAX_PHASES + 1), "at most 64"),
    ],
)
def test_an_invalid_schedule_is_refused(phases: list[Phase], fragment: str) -> None:
    """The error names what is wrong."""
    with pytest.raises(InvalidSpec, match=fragment):
        check_schedule(Schedule(phases=phases))


IMPORTED = """
import sys
from shoal_proto.v1.optimizer_pb2 import Phase, Schedule, StepPhase
from shoal_server.parameters.optimizers.schedules import RunningSchedule
phase = Phase(step=StepPhase(step_size=2, gamma=0.5))
RunningSchedule(Schedule(phases=[phase]), 0.1).advance(1)
print("torch._dynamo" in sys.modules)
"""


def test_a_schedule_does_not_import_torchs_compiler() -> None:
    """The import takes two seconds, in which a server would answer nobody."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"
