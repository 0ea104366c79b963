"""How far a job has come, as far as its coordinator knows: what would be lost with its state.

`Progress` is kept in the job's record in etcd. That a synchronous generation ran is durable before
its members take a step. The step is what they said last: in heartbeats, at a boundary, after a
break. It becomes durable with the record of each generation, not with each step.
"""

from dataclasses import dataclass, field

from shoal_server.core.generations.roster import NO_GENERATION, Generation, Step

NO_STEP = Step(0)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a job that is over."""

    step: Step
    """The last one; where members go at their own pace, the steps of all of them together."""
    loss: float | None
    """The one that was reported last; None where none was heard of."""
    num_samples: int | None
    """Over all epochs; None where members do not lease them."""


@dataclass(kw_only=True)
class Tally:
    """What people are told of a job's whole life."""

    begun_s: float = 0.0
    num_breaks: int = 0
    """Running generations that ended because a member was lost, or a collective failed."""
    idle_s: float = 0.0
    """Seconds in which nobody trained: until the first generation ran, and from each break until
    the next one did."""
    result: Result | None = None
    """Of a job that is over; None until it is kept."""
    is_cleared: bool = False
    """Whether all that was kept of the job is gone, but for its own record."""


@dataclass(kw_only=True)
class Progress:
    trained_in: Generation = NO_GENERATION
    """The newest generation that ran, of those whose members hold the job's state."""
    reached: Step = NO_STEP
    """Steps behind the newest state that somebody spoke of."""
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def has_trained(self) -> bool:
        """Whether a step may have been committed: initial values are the job's state no more."""
        return self.trained_in > NO_GENERATION or self.reached > 0

    def heard_of(self, step: Step) -> None:
        self.reached = max(self.reached, step)

    def ran(self, generation: Generation, start: Step) -> bool:
        """A generation runs, from the state after `start` steps. True if it is the first."""
        is_first = self.trained_in == NO_GENERATION
        self.trained_in, self.reached = generation, start
        return is_first
