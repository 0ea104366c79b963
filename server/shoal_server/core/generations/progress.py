"""How far a job has come, as far as its coordinator knows: what would be lost with its state.

`Progress` is kept in the job's record in etcd. That a synchronous generation ran is durable before
its members take a step. The step is what they said last: in heartbeats, at a boundary, after a
break. It becomes durable with the record of each generation, not with each step.
"""

from dataclasses import dataclass

from shoal_server.core.generations.roster import NO_GENERATION, Generation, Step

NO_STEP = Step(0)


@dataclass(kw_only=True)
class Progress:
    trained_in: Generation = NO_GENERATION
    """The newest generation that ran, of those whose members hold the job's state."""
    reached: Step = NO_STEP
    """Steps behind the newest state that somebody spoke of."""

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
