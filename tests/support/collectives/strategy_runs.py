"""Training by strategies on ranks that are threads, without a session, and in one process."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.process_group.interface import Group, Seat
from shoal.data.batches import Batch, Loader
from shoal.data.order import range_of_rank
from shoal.layouts.base import LossFunction
from shoal.membership.generation import Context, Generation
from shoal.session.micro_batches import MicroBatches, scaled
from shoal.step_context import current, set_current
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.c10d import Store
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

# Otherwise each rank that is a thread would have its own pool of threads.
torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step; by default it is one pass in the parameters' own dtype."""

    passes: Sequence[int] = (1,)
    """Numbers of backward passes of steps, cyclically; each takes a part of a member's samples."""
    max_norm: float = math.inf
    """Norm to which gradients are clipped."""
    autocast: torch.dtype | None = None
    """Dtype in which layers compute."""
    parts_of_session: Sequence[int] = ()
    """Numbers of parts into which `batch.parts` cuts steps, cyclically, in place of `passes`."""

    def clips(self) -> bool:
        return math.isfinite(self.max_norm)

    def computing(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None)

    def parts(self, batch: Batch) -> Iterator[tuple[Any, Any, float]]:
        """Yield (inputs, targets, fraction of the member's samples) for each pass. All members make
        the same number of passes, if need be with a sample of weight 0."""
        size, passes = len(batch.inputs), self.passes[batch.step % len(self.passes)]
        for index in range(passes):
            start, stop = range_of_rank(0, size, index, passes)
            part = slice(start, stop) if start < stop else slice(0, 1)
            yield batch.inputs[part], batch.targets[part], (stop - start) / size


PLAIN = StepOptions()


def part_of(loss_function: LossFunction, fraction: float) -> LossFunction:
    """Scale a loss for a part of the samples: the parts' losses add up to the mean of all."""
    return lambda outputs, targets: loss_function(outputs, targets) * fraction


class DefaultGroup:
    """A generation's group that is the default group of a run of ranks; the run itself ends it."""

    def open(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None
        return group

    def cut(self, reason: str) -> None:
        raise AssertionError("nobody is lost in these tests")

    def check(self) -> None:
        pass

    def retire(self) -> None:
        pass

    def keep_for_ever(self) -> None:
        raise AssertionError("nothing hangs in these tests")


@dataclass(frozen=True)
class GivenBackend:
    """A backend whose groups come from the test."""

    made: Callable[[Seat], Group]
    name: str = "given"
    is_watched: bool = False

    def group(self, seat: Seat, store: Store) -> Group:
        return self.made(seat)

    def stalled_since_s(self, now_s: float) -> float | None:
        return None

    def is_failure(self, error: BaseException) -> bool:
        return False


def use_groups(strategy: SynchronousStrategy, made: Callable[[Seat], Group]) -> None:
    """Make generations of the strategy use the groups that `made` returns; needs no coordinator."""
    strategy.use_backend(GivenBackend(made))
    strategy.attach(Context(job="job", coordinators=(), token=Token, limits=pb.Limits()))


def use_group(strategy: SynchronousStrategy, group: Group | None = None) -> None:
    """Make all generations of the strategy use this group, or the run's default group."""
    chosen = group or DefaultGroup()
    use_groups(strategy, lambda seat: chosen)


def generation_of(
    names: Sequence[str],
    me: str,
    number: int = 1,
    states: Mapping[str, pb.StateAction] | None = None,
) -> Generation:
    """Return the generation as the coordinator would send it to `me`; `states` are those of members
    that do not receive."""
    states = states or {}
    entries = [
        pb.RosterEntry(member_id=name, rank=rank, state=states.get(name, pb.STATE_ACTION_RECEIVE))
        for rank, name in enumerate(names)
    ]
    roster = pb.Roster(generation=number, entries=entries, source_member_id=names[0])
    return Generation(
        record=pb.GenerationRecord(roster=roster), token=Token(member_id=me, generation=number)
    )


def take_step(
    strategy: Strategy,
    batch: Batch,
    loss_function: LossFunction,
    step_options: StepOptions = PLAIN,
    acknowledged: Callable[[], None] = lambda: None,
) -> None:
    """Take one step as `with session.step():` does."""
    strategy.begin_step()
    if step_options.parts_of_session:
        _take_parts(strategy, batch, loss_function, step_options)
    else:
        for inputs, targets, fraction in step_options.parts(batch):
            with step_options.computing():
                strategy.forward_backward(
                    inputs, targets, part_of(loss_function, fraction), batch.weight
                )
    if step_options.clips():
        strategy.clip_grad_norm(step_options.max_norm)
    strategy.end_step(acknowledged)


def _take_parts(
    strategy: Strategy, batch: Batch, loss_function: LossFunction, step_options: StepOptions
) -> None:
    """Train the parts as `for part in batch.parts(n)` does in a session."""
    of_step = MicroBatches(strategy, batch, 1 << 30)
    set_current(replace(current(), parts=of_step))
    for part in batch.parts(
        step_options.parts_of_session[batch.step % len(step_options.parts_of_session)]
    ):
        fraction = of_step.begin_pass()
        with step_options.computing():
            strategy.forward_backward(
                part.inputs, part.targets, scaled(loss_function, fraction), batch.weight
            )
    of_step.check_complete()
    set_current(replace(current(), parts=None))


def take_step_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    loss_function: LossFunction,
    step_options: StepOptions = PLAIN,
) -> None:
    """Take one step in one process."""
    optimizer.zero_grad()
    parts = list(step_options.parts(batch))
    for inputs, targets, fraction in parts:
        with step_options.computing():
            # Ranks average at the end; in bf16 another order would round differently.
            loss = part_of(loss_function, fraction * len(parts))(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(parts)
    if step_options.clips():
        nn.utils.clip_grad_norm_(model.parameters(), step_options.max_norm)
    optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training to be run by any strategy."""

    build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]
    """Returns model and optimizer of a seed; all start from the first rank's."""
    loader: Callable[[], Loader]
    loss: LossFunction
    num_steps: int = 50
    step_options: StepOptions = PLAIN
    computing: Callable[[nn.Module], nn.Module] = lambda model: model
    """Changes the one process's model as a strategy changes its own model internally."""


def by_one_process(
    run: Run,
    take: Callable[[nn.Module, torch.optim.Optimizer, Batch], None] | None = None,
) -> dict[str, Tensor]:
    """Return the weights after all steps in one process; `take` replaces the run's own step."""
    model, optimizer = run.build(0)
    loader, computing = run.loader(), run.computing(model)
    for step in range(run.num_steps):
        batch = loader.synchronous(step, 0, 1)
        if take is not None:
            take(computing, optimizer, batch)
        else:
            take_step_alone(computing, optimizer, batch, run.loss, run.step_options)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Rank(NamedTuple):
    """A rank whose strategy has entered a generation of all ranks."""

    strategy: SynchronousStrategy
    model: Any
    """Model that the strategy shows to the script."""
    optimizer: torch.optim.Optimizer
    """Optimizer that the strategy shows to the script."""
    share: tuple[int, int]
    """Share of batches, as index and count."""


def enter(run: Run, strategy: SynchronousStrategy, group: Group | None = None) -> Rank:
    """Make this rank's strategy enter a generation of all ranks."""
    use_group(strategy, group)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = strategy.distribute(*run.build(rank))
    names = [f"m{each}" for each in range(world_size)]
    generation = generation_of(names, names[rank])
    strategy.enter(generation)
    return Rank(strategy, model, optimizer, strategy.data_share(generation))


def entered(run: Run, strategy: SynchronousStrategy, group: Group | None = None) -> tuple[int, int]:
    """Make this rank's strategy enter a generation of all ranks; return its share of batches."""
    return enter(run, strategy, group).share


def weights_of(strategy: Strategy) -> dict[str, Tensor]:
    """Return a copy of the model's state, as the strategy shows it."""
    return {name: tensor.clone() for name, tensor in strategy.state_dict().items()}


def by_a_rank(
    run: Run, made: Callable[[], Strategy], take: Callable[[Rank, Batch], None] | None = None
) -> dict[str, Tensor]:
    """Train on this rank; return the strategy's weights after all steps. `take` replaces the run's
    own step."""
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    rank, loader = enter(run, strategy), run.loader()
    for step in range(run.num_steps):
        batch = loader.synchronous(step, *rank.share)
        if take is not None:
            take(rank, batch)
        else:
            take_step(strategy, batch, run.loss, run.step_options)
    strategy.finish()
    weights = weights_of(strategy)
    strategy.close()
    return weights


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference over all elements of two models."""
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
