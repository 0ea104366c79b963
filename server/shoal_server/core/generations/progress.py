"""Progress of a job as far as its coordinator knows: what is lost if the job's state is lost.

`JobProgress` is kept in the job's record in etcd. Before the members of the job's first synchronous
generation take a step, the record says that the generation ran. The step in the record is the
newest that members reported: in heartbeats, at a boundary, after a break. It becomes durable
whenever the record is written, as with each generation, and not with each step.
"""

from dataclasses import dataclass, field

from shoal_server.core.generations.roster import NO_GENERATION, Generation, Step

NO_STEP = Step(0)


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Result of a job that is over."""

    step: Step
    """The last step; for an asynchronous job, the number of steps of all members together."""
    loss: float | None
    """The loss that was reported last; None if none was."""
    num_samples: int | None
    """Number of samples completed, over all epochs of the data; None if members lease none, or if
    the number is not known."""


@dataclass(kw_only=True)
class LifetimeFigures:
    """Figures over a job's whole life, for people to read."""

    begun_s: float = 0.0
    num_breaks: int = 0
    """Running generations that broke because a member was gone or a collective failed. Breaks while
    the job is being stopped, or at the boundary of a planned change, are not counted."""
    idle_s: float = 0.0
    """Seconds without a running generation: until the first generation ran, and from each break
    until the next generation ran."""
    result: JobResult | None = None
    """Result of a job that is over; None until it is kept."""
    is_cleared: bool = False
    """True if all that was kept of the job was removed, except its own record."""


@dataclass(kw_only=True)
class JobProgress:
    trained_in: Generation = NO_GENERATION
    """The newest synchronous generation that ran."""
    reached: Step = NO_STEP
    """The newest step whose state a member has reported. When a synchronous generation begins to
    run, this is set to the step from which it starts."""
    tally: LifetimeFigures = field(default_factory=LifetimeFigures, compare=False)

    @property
    def has_trained(self) -> bool:
        """True if a step may have been committed: initial values are no longer the job's state."""
        return self.trained_in > NO_GENERATION or self.reached > 0

    def note_reached(self, step: Step) -> None:
        self.reached = max(self.reached, step)

    def record_run(self, generation: Generation, start: Step) -> bool:
        """Note that a synchronous generation runs from the state after `start` steps. True for the
        job's first one."""
        is_first = self.trained_in == NO_GENERATION
        self.trained_in, self.reached = generation, start
        return is_first
