"""Progress of a job as its coordinator knows it, which shows what a lost state costs.

The newest reported step becomes durable with each write of the job's record, not with each step.
"""

from dataclasses import dataclass, field

from shoal_server.core.generations.roster import NO_GENERATION, Generation, Step

NO_STEP = Step(0)


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Result of a job that is over."""

    step: Step
    """Last step; for an asynchronous job, the number of all members' steps."""
    loss: float | None
    """Last reported loss; None without any."""
    num_samples: int | None
    """Completed samples, over all epochs of the data; None if unknown."""


@dataclass(kw_only=True)
class LifetimeFigures:
    """Figures over a job's whole life, for people."""

    begun_s: float = 0.0
    num_breaks: int = 0
    """Running generations that broke because a member was gone or a collective failed, and were
    followed by another generation."""
    idle_s: float = 0.0
    """Time without a running generation, up to `idle_since_s`."""
    idle_since_s: float | None = None
    """Time since which no generation runs; None if one runs, or the job is over."""
    result: JobResult | None = None
    """None until the result is kept."""
    is_cleared: bool = False
    """True if only the job's own record is left."""

    def begin_idle(self, now_s: float) -> None:
        """Note that no generation runs."""
        if self.idle_since_s is None:
            self.idle_since_s = now_s

    def end_idle(self, now_s: float) -> None:
        """Note that a generation runs, or that the job is over."""
        self.idle_s, self.idle_since_s = self.idle_until_s(now_s), None

    def idle_until_s(self, now_s: float) -> float:
        """Return the whole time without a running generation."""
        since_s = now_s if self.idle_since_s is None else self.idle_since_s
        return self.idle_s + max(0.0, now_s - since_s)


@dataclass(kw_only=True)
class JobProgress:
    trained_in: Generation = NO_GENERATION
    """Newest synchronous generation that ran."""
    reached: Step = NO_STEP
    """Newest reported step, or the one from which the running synchronous generation started."""
    tally: LifetimeFigures = field(default_factory=LifetimeFigures, compare=False)

    @property
    def has_trained(self) -> bool:
        """True if a step may have been committed."""
        return self.trained_in > NO_GENERATION or self.reached > 0

    def note_reached(self, step: Step) -> None:
        self.reached = max(self.reached, step)

    def record_run(self, generation: Generation, start: Step) -> bool:
        """Note that a synchronous generation runs from step `start`; True for the job's first
        one."""
        is_first = self.trained_in == NO_GENERATION
        self.trained_in, self.reached = generation, start
        return is_first
