"""Staleness policies and schedules, as options of members that train at their own pace."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.members.async_members import Net, groups, loss_of, new_model, start, train
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shoal.strategies.asynchronous.async_sgd import MAX_REDONE, AsyncSGD
from shoal.strategies.asynchronous.optimizer_spec import FollowedSchedule
from shoal_proto.errors import InvalidSpec, StalePush

LR = 0.1


servers = servers_fixture(2)


def warm_up(optimizer: torch.optim.Optimizer) -> LRScheduler:
    phases: list[LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
        lr_scheduler.CosineAnnealingLR(optimizer, 5, 0.001),
    ]
    return lr_scheduler.SequentialLR(optimizer, phases, [3])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "warm-up": warm_up,
}


def restarts_behind_a_rise(optimizer: torch.optim.Optimizer) -> LRScheduler:
    phases: list[LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    return lr_scheduler.SequentialLR(optimizer, phases, [2])


class Later(LRScheduler):
    """A script's own schedule: after two steps, that of another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = lr_scheduler.ExponentialLR(optimizer, 0.9)
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self.last_epoch > 2:
            self.after.step()


FOLLOWED: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda update: (update + 1) / 4),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6, cycle_momentum=False),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)], o),
    "restarts": restarts_behind_a_rise,
    "another within": Later,
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_a_schedule_that_members_step_goes_back_with_updates_that_were_undone(kind: str) -> None:
    """Rates after each restore are those of a new schedule, in every group."""

    def new() -> tuple[torch.optim.Optimizer, FollowedSchedule]:
        optimizer = torch.optim.SGD(groups(new_model()), lr=0.1)  # type: ignore[arg-type]
        return optimizer, FollowedSchedule(FOLLOWED[kind](optimizer))

    optimizer, schedule = new()
    for num_updates in (5, 3, 4, 1, 5, 0):
        schedule.step_to(num_updates)
        fresh, expected = new()
        expected.step_to(num_updates)
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in fresh.param_groups]


class Locked(lr_scheduler.ExponentialLR):
    """A script's own schedule, with an attribute that cannot be copied."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.lock = threading.Lock()
        super().__init__(optimizer, 0.5)


def test_a_schedule_that_cannot_be_copied_is_refused_only_when_it_must_go_back() -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=0.1)
    schedule = FollowedSchedule(Locked(optimizer))
    schedule.step_to(2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    with pytest.raises(InvalidSpec, match="Locked, TypeError"):
        schedule.step_to(1)


@pytest.mark.long
def test_servers_apply_the_schedules_of_a_job(servers: ParameterServers) -> None:
    """The result is bit for bit that of one torch worker that steps the schedule itself, in groups
    with rates of their own. Here the servers apply it."""
    for job, make in (SCHEDULES | FOLLOWED).items():
        model = new_model()
        alone = copy.deepcopy(model)
        optimizer = torch.optim.Adam(groups(model), lr=0.01)  # type: ignore[arg-type]
        strategy = AsyncSGD(schedule=make(optimizer))
        start(servers, model, optimizer, strategy=strategy, job=job.replace(" ", "-"))
        train(strategy, model, range(6))
        reference = torch.optim.Adam(groups(alone), lr=0.01, fused=True)  # type: ignore[arg-type]
        schedule = make(reference)
        for step in range(6):
            reference.zero_grad()
            loss_of(alone, step).backward()  # type: ignore[no-untyped-call]
            reference.step()
            schedule.step()
        assert_equal(model, alone)
        strategy.close()


def test_a_schedule_continues_after_the_loss_of_a_server(servers: ParameterServers) -> None:
    """A server is killed. The other one has the rates and the optimizer's state of that moment: no
    bit differs from training alone."""
    model = new_model()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)
    strategy = AsyncSGD(schedule=warm_up(optimizer), staleness="compensate")
    start(servers, model, optimizer, strategy=strategy)
    train(strategy, model, range(4))
    servers.stop("ps-1")
    train(strategy, model, range(4, 8))
    reference = torch.optim.Adagrad(alone.parameters(), lr=0.1, lr_decay=0.1, fused=True)
    schedule = warm_up(reference)
    for step in range(8):
        reference.zero_grad()
        loss_of(alone, step).backward()  # type: ignore[no-untyped-call]
        reference.step()
        schedule.step()
    assert_equal(model, alone)
    strategy.close()


def test_a_schedule_that_members_step_goes_by_the_updates_of_all(
    servers: ParameterServers,
) -> None:
    """A script's own schedule follows the updates of all members. If it followed each member's own
    steps, two members would go half of its way, and a joiner would start at its beginning. Further
    steps stay at its end."""
    rates, members = [], []

    def join(rank: int) -> None:
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = lr_scheduler.OneCycleLR(
            optimizer, 1.0, total_steps=8, anneal_strategy="linear", cycle_momentum=False
        )
        strategy = AsyncSGD(schedule=schedule)
        start(servers, model, optimizer, rank=rank, strategy=strategy)
        members.append((strategy, model, optimizer))

    def step(rank: int) -> None:
        strategy, model, optimizer = members[rank]
        train(strategy, model, range(1))
        rates.append(optimizer.param_groups[0]["lr"])

    join(0)
    step(0)
    join(1)
    for rank in (1, 0, 1, 0, 1):
        step(rank)
    join(2)
    for rank in (2, 2, 2, 2):
        step(rank)
    plain = torch.optim.SGD(new_model().parameters(), lr=1.0)
    planned = lr_scheduler.OneCycleLR(
        plain, 1.0, total_steps=8, anneal_strategy="linear", cycle_momentum=False
    )
    wanted = [plain.param_groups[0]["lr"]]
    for _ in range(7):
        plain.step()
        planned.step()
        wanted.append(plain.param_groups[0]["lr"])
    # A member that has not pushed since another's push does not know of that update yet.
    assert rates == [wanted[at] for at in (0, 1, 1, 2, 3, 4, 6, 7, 7, 7)]
    for strategy, _, _ in members:
        strategy.close()


def assert_equal(model: nn.Module, wanted: nn.Module) -> None:
    for (name, seen), value in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(seen, value), name


def two(servers: ParameterServers, make: Callable[[], AsyncSGD]) -> list[tuple[AsyncSGD, Net]]:
    """Return two members with plain SGD, on the same values."""
    members = []
    for rank in range(2):
        model = new_model(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        strategy = start(servers, model, optimizer, rank=rank, strategy=make())
        members.append((strategy, model))
    return members


def begin(strategy: AsyncSGD, model: nn.Module, step: int) -> None:
    """Take a step up to its end."""
    strategy.begin_step()
    strategy.backward(loss_of(model, step), 1.0)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_stale_step_is_scaled_down(servers: ParameterServers) -> None:
    """The rate of a step that is two updates behind is halved."""
    (slow, model), (fast, other) = two(servers, lambda: AsyncSGD(staleness="scale"))
    begin(slow, model, 1)
    train(fast, other, range(2))
    found = gradients(model)
    slow.end_step(lambda: None)
    for name, before in values(other).items():
        torch.testing.assert_close(
            dict(model.named_parameters())[name], before - LR / 2 * found[name]
        )
    slow.close()
    fast.close()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stale_step_is_compensated(servers: ParameterServers, adaptive: bool) -> None:
    """The compensation follows the change of values since the pull, in parts that were not stale
    too."""
    make = lambda: AsyncSGD(staleness="compensate", compensation=0.5, adaptive=adaptive)  # noqa: E731
    (slow, model), (fast, other) = two(servers, make)
    begin(slow, model, 1)
    base, found = values(model), gradients(model)
    begin(fast, other, 2)
    pushed = gradients(other)
    fast.end_step(lambda: None)
    slow.end_step(lambda: None)
    for name, before in values(other).items():
        g = found[name]
        mean = 0.95 * (0.05 * pushed[name] ** 2) + 0.05 * g**2
        strength = 0.5 / (mean + 1e-7).sqrt() if adaptive else 0.5
        expected = before - LR * (g + strength * g * g * (before - base[name]))
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected)
    assert slow.metrics()["staleness"] == 1.0
    slow.close()
    fast.close()


def test_pushes_of_a_lone_member_are_never_stale(servers: ParameterServers) -> None:
    """A lone member with delay compensation trains as torch alone, to the last bit. The model has a
    parameter that is not contiguous, and one without a gradient."""
    model = new_model()
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    strategy = AsyncSGD(staleness="compensate", reject_above=0)
    start(servers, model, optimizer, strategy=strategy)
    train(strategy, model, range(4))
    reference = torch.optim.SGD(alone.parameters(), lr=LR, fused=True)
    for step in range(4):
        reference.zero_grad()
        loss_of(alone, step).backward()  # type: ignore[no-untyped-call]
        reference.step()
    assert_equal(model, alone)
    strategy.close()


def test_a_step_that_is_too_stale_is_computed_again(servers: ParameterServers) -> None:
    """The step did not happen, fresh values are pulled, and the next attempt succeeds."""
    (slow, model), (fast, other) = two(
        servers, lambda: AsyncSGD(staleness="reject", reject_above=1)
    )
    begin(slow, model, 1)
    train(fast, other, range(2))
    acknowledged: list[int] = []
    with pytest.raises(StalePush) as refused:
        slow.end_step(lambda: acknowledged.append(1))
    assert slow.redoes(refused.value)
    assert not slow.redoes(ValueError())
    assert (slow.step, acknowledged) == (0, [])
    assert_equal(model, other)
    assert train(slow, model, range(1, 2)) == 1
    assert slow.step == 1
    assert slow.metrics()["rejected"] == 1.0
    assert set(servers.versions().values()) == {4}
    slow.close()
    fast.close()


def test_a_forward_pass_may_make_a_buffer_under_a_staleness_limit(
    servers: ParameterServers,
) -> None:
    """Regression: such a buffer was refused, after its step was pushed, though no checkpoint has
    buffers."""
    model = new_model()
    model.register_buffer("mean", None)

    def fill(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        module.mean = inputs[0].mean()

    model.register_forward_pre_hook(fill)
    strategy = AsyncSGD(staleness="reject", reject_above=1)
    start(servers, model, torch.optim.SGD(model.parameters(), lr=LR), strategy=strategy)
    assert train(strategy, model, range(3)) == 3
    assert strategy.step == 3
    strategy.close()


def test_a_refused_step_leaves_no_trace_in_a_members_own_buffers_and_weights(
    servers: ParameterServers,
) -> None:
    """A replaced buffer and following weights each change once, with the step that is taken."""
    (slow, model), (fast, other) = two(
        servers, lambda: AsyncSGD(staleness="reject", reject_above=1)
    )
    model.register_buffer("count", torch.zeros(()))
    model.register_parameter("behind", nn.Parameter(torch.ones(()), requires_grad=False))

    def change(module: nn.Module, _: object) -> None:
        module.count = module.get_buffer("count") + 1
        module.get_parameter("behind").data.mul_(0.5)

    model.register_forward_pre_hook(change)
    begin(slow, model, 1)
    train(fast, other, range(2))
    changed = []
    with pytest.raises(StalePush) as refused:
        slow.end_step(lambda: None)
    changed.append((float(model.get_buffer("count")), float(model.get_parameter("behind"))))
    assert slow.redoes(refused.value)
    assert train(slow, model, range(1, 2)) == 1
    changed.append((float(model.get_buffer("count")), float(model.get_parameter("behind"))))
    assert changed == [(0.0, 1.0), (1.0, 0.5)]
    slow.close()
    fast.close()


def test_only_refused_shards_are_pushed_again(servers: ParameterServers) -> None:
    """Shards each get the step once, even if one shard was too far ahead and another was not."""
    (slow, model), (fast, other) = two(
        servers, lambda: AsyncSGD(staleness="reject", reject_above=0)
    )
    begin(slow, model, 1)
    ahead = min(servers.versions())
    fast._refusals.shards = frozenset({ahead})
    train(fast, other, range(1))
    with pytest.raises(StalePush, match=f"shard {ahead}"):
        slow.end_step(lambda: None)
    versions = dict.fromkeys(servers.versions(), 2)
    assert servers.versions() == versions
    assert train(slow, model, range(1, 2)) == 1
    assert servers.versions() == versions | {ahead: 3}
    assert train(slow, model, range(1)) == 1
    assert servers.versions() == {shard: v + 1 for shard, v in (versions | {ahead: 3}).items()}
    slow.close()
    fast.close()


def test_a_member_that_is_always_too_late_gives_up(servers: ParameterServers) -> None:
    """The error after `MAX_REDONE` attempts says what could be changed, and ends the session."""
    (slow, model), (fast, other) = two(
        servers, lambda: AsyncSGD(staleness="reject", reject_above=0)
    )
    for attempt in range(MAX_REDONE + 1):
        begin(slow, model, 1)
        train(fast, other, range(1))
        with pytest.raises(StalePush) as refused:
            slow.end_step(lambda: None)
        assert slow.redoes(refused.value) is (attempt < MAX_REDONE)
    assert "Raise reject_above" in str(refused.value)
    slow.close()
    fast.close()


@pytest.mark.parametrize(
    "options",
    [
        {"staleness": "hope"},
        {"staleness": "reject"},
        {"staleness": "reject", "reject_above": -1},
        {"staleness": "scale", "compensation": 0.1},
        {"staleness": "compensate", "compensation": -1.0},
        {"lost_wait_s": -1.0},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object]) -> None:
    """The refusal comes at construction, with the value seen."""
    with pytest.raises(InvalidSpec, match="saw "):
        AsyncSGD(**options)  # type: ignore[arg-type]


def test_members_must_have_the_same_policy_and_schedule() -> None:
    """Policy and schedule are fields of a member's proposal, so a member that differs is
    refused."""
    found = []
    for number in (1, 2):
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        schedule = lr_scheduler.StepLR(optimizer, number)
        strategy = AsyncSGD(staleness="reject", reject_above=number, schedule=schedule)
        strategy.distribute(model, optimizer)
        found.append(strategy.fields())
    differing = {name for name in found[0] if found[0][name] != found[1][name]}
    assert differing == {"staleness", "schedule"}


def test_schedules_that_the_servers_cannot_apply_are_refused() -> None:
    """The refusal comes before anything is sent, for a schedule that follows a metric, belongs to
    another optimizer, or was stepped."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    other = torch.optim.SGD(model.parameters(), lr=LR)
    stepped = lr_scheduler.StepLR(optimizer, 3)
    optimizer.step()
    stepped.step()
    for schedule, fragment in (
        (lr_scheduler.ReduceLROnPlateau(optimizer), "follows a metric"),
        (lr_scheduler.StepLR(other, 3), "a schedule of another optimizer"),
        (stepped, "1 steps taken"),
        (lr_scheduler.CosineAnnealingLR(optimizer, 2.5), "T_max"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSpec, match=fragment):
            AsyncSGD(schedule=schedule).distribute(model, optimizer)
