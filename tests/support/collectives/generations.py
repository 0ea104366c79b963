"""Runs of strategies over several generations with losses, on ranks that are threads."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from support.collectives.strategy_runs import Run, generation_of, use_groups, weights_of
from torch import Tensor

from shoal.backends.in_memory.group import open_world
from shoal.backends.in_memory.hub import Hub
from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.in_memory.worlds import unbind
from shoal.membership.generation import Generation
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import GenerationBroken
from shoal_proto.v1 import membership_pb2 as pb

WAIT_S = 60.0


class CutGroup:
    """The group of one generation on one rank; a cut on any rank ends it on all."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank

    def open(self) -> dist.ProcessGroup:
        open_world(self._hub, self._rank)
        group = dist.group.WORLD
        assert group is not None
        return group

    def cut(self, reason: str) -> None:
        self._hub.fail(reason)

    def check(self) -> None:
        if self._hub.failure:
            raise GenerationBroken("the group was cut", seen=self._hub.failure)

    def retire(self) -> None:
        self._hub.end(self._rank)
        unbind()

    def keep_for_ever(self) -> None:
        raise AssertionError("nothing hangs in these tests")


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A generation that is about to begin, as the coordinator forms it."""

    number: int
    names: Sequence[str]
    """Names of the members, by rank."""
    keep: Mapping[str, pb.StateAction]
    hub: Hub
    gate: threading.Barrier
    """Barrier at which its members wait for each other once it has ended."""


@dataclass(kw_only=True)
class JobRun:
    """A run of members m0, m1, ... of one job. All are in the first generation, and those that were
    not lost are in each later one."""

    run: Run
    made: Callable[[], Strategy]
    world_size: int
    on_step: Callable[["Member"], None] = lambda member: None
    """Called before each step; may raise Lost, or plant a fault."""
    on_gradients: Callable[["Member"], None] = lambda member: None
    """Called after the backward pass of each step, as a script's own code."""

    def weights(self) -> list[Mapping[str, Tensor] | None]:
        """Return each member's weights after all steps; None for lost members."""
        self._lock = threading.Lock()
        self._number = 0
        self._entered: dict[str, tuple[bool, int]] = {}
        self._first = threading.Barrier(self.world_size, self._form)
        return run_in_memory(self._body, self.world_size, timeout_s=WAIT_S)

    def _body(self) -> Mapping[str, Tensor] | None:
        rank = dist.get_rank()
        unbind()
        member = Member(self, f"m{rank}", self._first)
        try:
            return member.train()
        except BaseException:
            member.gate.abort()
            raise

    def enter(self, name: str, *, has_state: bool, step: int) -> None:
        """Enter a member for the next generation, with this state."""
        with self._lock:
            self._entered[name] = (has_state, step)

    def _form(self) -> None:
        """Form a generation, once all members of the last one have reached its end."""
        entered, self._entered = self._entered, {}
        self._number += 1
        steps = {name: step for name, (has, step) in entered.items() if has}
        newest = max(steps.values(), default=0)
        keep = {name: pb.STATE_ACTION_KEEP for name, step in steps.items() if step == newest}
        names = sorted(entered, key=lambda name: (name not in keep, name))
        self.formed = Formed(
            number=self._number,
            names=names,
            keep=keep,
            hub=Hub(len(names), WAIT_S),
            gate=threading.Barrier(len(names), self._form),
        )


class Lost(Exception):
    """Raised in a member that is lost."""


class Member:
    """A member of the run."""

    def __init__(self, job_run: JobRun, name: str, gate: threading.Barrier) -> None:
        self.job_run, self.name, self.gate = job_run, name, gate
        strategy = job_run.made()
        assert isinstance(strategy, SynchronousStrategy)
        self.strategy: Any = strategy
        self.number = 0
        """Number of the current generation."""

    def train(self) -> Mapping[str, Tensor] | None:
        """Train through all generations. Returns the weights after all steps; None if lost."""
        strategy, is_lost = self.strategy, False
        use_groups(strategy, lambda seat: CutGroup(self.job_run.formed.hub, seat.rank))
        strategy.distribute(*self.job_run.run.build(int(self.name[1:])))
        while True:
            if not is_lost:
                self.job_run.enter(self.name, has_state=strategy.has_state, step=strategy.step)
            self.gate.wait(WAIT_S)
            if is_lost:
                return None
            formed = self.job_run.formed
            self.number, self.gate = formed.number, formed.gate
            try:
                return self._steps(generation_of(formed.names, self.name, self.number, formed.keep))
            except Lost:
                is_lost = True
            except (GenerationBroken, dist.DistError):
                pass
            strategy.cut(self.number)
            strategy.abandon()

    def _steps(self, generation: Generation) -> Mapping[str, Tensor]:
        run, strategy, loader = self.job_run.run, self.strategy, self.job_run.run.loader()
        strategy.enter(generation)
        share = strategy.data_share(generation)
        while strategy.step < run.num_steps:
            self.job_run.on_step(self)
            batch = loader.synchronous(strategy.step, *share)
            strategy.begin_step()
            strategy.forward_backward(batch.inputs, batch.targets, run.loss, batch.weight)
            self.job_run.on_gradients(self)
            strategy.end_step(lambda: None)
        strategy.finish()
        weights = weights_of(strategy)
        strategy.close()
        return weights
