"""Conversion of a torch optimizer and its schedule for the parameter servers."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from google.protobuf.message import Message
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from shoal.torch_private.schedulers import mark_stepped, milestones_of, schedulers_in
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer
from shoal_proto.v1.optimizer_pb2 import (
    ConstantPhase,
    CosinePhase,
    ExponentialPhase,
    HyperParameters,
    LinearPhase,
    MultiStepPhase,
    OptimizerSpec,
    Phase,
    Schedule,
    StepPhase,
)

_KINDS: Mapping[type[Optimizer], str] = {
    SGD: "sgd",
    Adagrad: "adagrad",
    Adam: "adam",
    AdamW: "adamw",
}


def to_spec(optimizer: Optimizer, schedule: LRScheduler | None = None) -> OptimizerSpec:
    """Describe the optimizer for the servers.

    Raises UnsupportedOptimizer if the servers lack it, if it has stepped, or if its groups decay
    weights in different ways. Raises InvalidSpec for a schedule that has begun already, belongs to
    another optimizer, follows a metric, or has settings that the servers lack.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise UnsupportedOptimizer(
            "the optimizer runs on the parameter servers, which do not have this class",
            seen=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            expected="torch.optim.SGD, Adagrad, Adam or AdamW (not a subclass)",
            fix="Choose one of these, or the strategy `ddp`.",
        )
    _check_new(optimizer)
    groups = optimizer.param_groups
    if kind in ("adam", "adamw"):
        decoupled = {kind == "adamw" or bool(g.get("decoupled_weight_decay")) for g in groups}
        if len(decoupled) > 1:
            raise UnsupportedOptimizer(
                "the parameter groups differ in how weight decay is applied",
                seen="decoupled_weight_decay both true and false",
                expected="the same in all groups",
            )
        kind = "adamw" if decoupled.pop() else "adam"
    # "initial_lr", as the schedule may have changed "lr" for the first step already.
    rate = "lr" if schedule is None else "initial_lr"
    is_known = schedule is not None and not FollowedSchedule.follows(schedule)
    if schedule is not None:
        _check_beginning(schedule, optimizer)
    return OptimizerSpec(
        kind=kind,
        groups=[_hyper_parameters(group, float(group[rate])) for group in groups],
        schedule=to_schedule(schedule) if schedule is not None and is_known else None,
    )


def _check_new(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        # Adagrad has state before its first step.
        stepped = float(state["step"]) > 0 if "step" in state else bool(_held(state))
        if stepped:
            raise UnsupportedOptimizer(
                "the optimizer has taken steps already",
                seen=f"{type(optimizer).__name__} with the state {', '.join(_held(state))}, from"
                " its own steps or from load_state_dict",
                expected="a new optimizer: the parameter servers begin without state",
                fix="Make a new one; to continue a job on parameter servers, restore its snapshot"
                " (`shoal restore`). `ddp` takes the state over.",
            )


def _held(state: Mapping[str, Any]) -> list[str]:
    return [key for key, value in state.items() if value is not None]


def _hyper_parameters(group: Mapping[str, Any], lr: float) -> HyperParameters:
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    return HyperParameters(
        lr=lr,
        weight_decay=float(group["weight_decay"]),
        momentum=float(group.get("momentum", 0.0)),
        dampening=float(group.get("dampening", 0.0)),
        nesterov=bool(group.get("nesterov", False)),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group.get("eps", 0.0)),
        amsgrad=bool(group.get("amsgrad", False)),
        maximize=bool(group.get("maximize", False)),
        lr_decay=float(group.get("lr_decay", 0.0)),
        initial_accumulator_value=float(group.get("initial_accumulator_value", 0.0)),
    )


def refuse_changes(optimizer: Optimizer, spec: OptimizerSpec, step: int) -> None:
    """Raise InvalidSpec if a hyperparameter other than a learning rate differs from the servers'.

    Raises UnsupportedOptimizer if the optimizer has stepped.
    """
    for index, (known, now) in enumerate(zip(spec.groups, to_spec(optimizer).groups, strict=True)):
        now.lr = known.lr
        if now == known:
            continue
        names = [f.name for f in known.DESCRIPTOR.fields]
        changed = [name for name in names if getattr(known, name) != getattr(now, name)]
        raise InvalidSpec(
            f"the optimizer's {', '.join(changed)} changed during training, in step {step}",
            seen=", ".join(f"{name} {getattr(now, name):g} in group {index}" for name in changed),
            expected=", ".join(f"{name} {getattr(known, name):g}" for name in changed)
            + ", as at session.distribute: the servers step with these values; only learning rates"
            " are allowed to change",
            fix="Pass cycle_momentum=False to OneCycleLR or CyclicLR, which otherwise change"
            " momentum and betas. Or choose the strategy `ddp`.",
        )


class FollowedSchedule:
    """A schedule that the servers cannot step: each member steps its own copy, and sends the
    learning rates."""

    def __init__(self, schedule: LRScheduler) -> None:
        """Takes ownership of a schedule that has not been stepped."""
        self._schedule = schedule
        self._num_steps = 0
        self._first_state: dict[str, Any] | None = None
        try:
            self._first_state = self._copied(schedule.state_dict())
        except Exception as error:  # noqa: BLE001 - raised by `_begin_anew`, if it is ever called
            self._not_copied = error
        self._first_rates = deepcopy([group["lr"] for group in schedule.optimizer.param_groups])

    @staticmethod
    def follows(schedule: LRScheduler) -> bool:
        """True if members must step the schedule themselves: the servers lack its class, or that of
        a part."""
        parts = schedulers_in(schedule) if type(schedule) is SequentialLR else [schedule]
        return any(type(part) not in _PHASES for part in parts)

    def step_to(self, num_updates: int) -> None:
        """Step the schedule to this number of updates of all members. If a restore has undone
        updates, the number is lower than before, and the schedule begins anew."""
        # There may be more updates than planned, as steps of a lost member are repeated. Beyond
        # `total_steps` OneCycleLR would raise an error.
        last = min(num_updates, getattr(self._schedule, "total_steps", num_updates + 1) - 1)
        mark_stepped(self._schedule.optimizer)
        if last < self._num_steps:
            self._begin_anew()
        while self._num_steps < last:
            self._schedule.step()
            self._num_steps += 1

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy the state; a part that is a schedule still changes the same optimizer."""
        optimizer = self._schedule.optimizer
        return deepcopy(state, {id(optimizer): optimizer})

    def _begin_anew(self) -> None:
        if self._first_state is None:
            raise InvalidSpec(
                "updates were undone, and the schedule cannot go back with them: its first"
                " state could not be copied",
                seen=f"{type(self._schedule).__name__}, {type(self._not_copied).__name__}:"
                f" {self._not_copied}",
                expected="a schedule whose state_dict() copy.deepcopy can copy",
                fix="Leave locks, generators and the like out of its state_dict().",
            ) from self._not_copied
        # Copied, as the schedule changes what it loads.
        self._schedule.load_state_dict(self._copied(self._first_state))
        groups = self._schedule.optimizer.param_groups
        for group, rate in zip(groups, deepcopy(self._first_rates), strict=True):
            group["lr"] = rate
        self._num_steps = 0

    def __str__(self) -> str:
        """Text of the settings that members must have in common."""
        state = self._schedule.state_dict()
        shown = [f"{name}={state[name]}" for name in sorted(state) if _is_shown(state[name])]
        return f"{type(self._schedule).__name__}({', '.join(shown)}), stepped by each member"


def _is_shown(value: object) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, list) and all(isinstance(each, int | float) for each in value)
    )


def _check_beginning(schedule: LRScheduler, optimizer: Optimizer) -> None:
    if isinstance(schedule, ReduceLROnPlateau):
        raise InvalidSpec(
            "the schedule follows a metric, which differs between members",
            seen=type(schedule).__qualname__,
            expected="a schedule by the number of updates",
        )
    begun = getattr(schedule, "last_epoch", 0)
    if schedule.optimizer is not optimizer or begun != 0:
        raise InvalidSpec(
            "the schedule does not begin with this training",
            seen="a schedule of another optimizer"
            if schedule.optimizer is not optimizer
            else f"{begun} steps taken with it",
            expected="a schedule of the distributed optimizer that has not been stepped",
        )


def to_schedule(schedule: LRScheduler) -> Schedule:
    """Describe the schedule for the servers.

    Raises InvalidSpec for settings that the servers lack.
    """
    if type(schedule) is not SequentialLR:
        return Schedule(phases=[_phase(schedule)])
    milestones = [_whole("milestone", milestone) for milestone in milestones_of(schedule)]
    begins = [0, *milestones]
    if begins != sorted(begins):
        raise InvalidSpec(
            "the schedule's milestones are not in order",
            seen=str(milestones),
            expected="none below the one before it",
        )
    phases = [_phase(part) for part in schedulers_in(schedule)]
    for phase, begin, end in zip(phases, begins, milestones, strict=False):
        phase.num_updates = end - begin
    return Schedule(phases=phases)


def _phase(schedule: Any) -> Phase:
    return _PHASES[type(schedule)](schedule)


_PHASES: Mapping[type[LRScheduler], Callable[[Any], Phase]] = {
    ConstantLR: lambda s: Phase(
        constant=ConstantPhase(factor=s.factor, total_iters=_whole("total_iters", s.total_iters))
    ),
    LinearLR: lambda s: Phase(
        linear=LinearPhase(
            start_factor=s.start_factor,
            end_factor=s.end_factor,
            total_iters=_whole("total_iters", s.total_iters),
        )
    ),
    StepLR: lambda s: Phase(
        step=StepPhase(step_size=_whole("step_size", s.step_size), gamma=s.gamma)
    ),
    MultiStepLR: lambda s: Phase(
        multi_step=MultiStepPhase(
            milestones=sorted(_whole("milestone", m) for m in s.milestones.elements()),
            gamma=s.gamma,
        )
    ),
    ExponentialLR: lambda s: Phase(exponential=ExponentialPhase(gamma=s.gamma)),
    CosineAnnealingLR: lambda s: Phase(
        cosine=CosinePhase(t_max=_whole("T_max", s.T_max), eta_min=s.eta_min)
    ),
}


def message_text(message: Message) -> str:
    return " ".join(str(message).split())


def _whole(name: str, value: float) -> int:
    if not 0 <= value < 2**63 or value != int(value):
        raise InvalidSpec(
            f"{name} of the schedule is not a number of updates",
            seen=repr(value),
            expected="a whole number from 0 up",
        )
    return int(value)
