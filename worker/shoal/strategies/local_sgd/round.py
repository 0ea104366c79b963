"""The steps that a member has taken by itself since all members last met."""

from collections.abc import Callable

from shoal.strategies.synchronous.hyperparameters import Hyperparameters, Values


class Round:
    """What its steps weigh, what the optimizer was told in each, and who waits to hear of them."""

    def __init__(self) -> None:
        self.applied: dict[int, Values] = {}
        """The hyperparameters of each step."""
        self.conflict = ""
        """Why a step that is taken again is not the same, if one is not."""
        self.weight = 0.0
        """Of the step under way, as below."""
        self._weights = 0.0
        self._unacknowledged: list[Callable[[], None]] = []

    def note(self, step: int, hyper: Hyperparameters) -> None:
        """Step number `step` is about to be taken: with what a schedule now says."""
        self.conflict = self.conflict or hyper.conflict(step)
        hyper.apply(step)
        self.applied[step] = hyper.now()

    def stepped(self, acknowledged: Callable[[], None]) -> None:
        """A step was taken; `acknowledged` is called when its round has ended."""
        self._weights += self.weight
        self._unacknowledged.append(acknowledged)

    def mean_weight(self, num_steps: int) -> float:
        """In each step the members' weights average to one, and so do these."""
        return self._weights / num_steps

    def end(self) -> None:
        """All members have met; the next round begins."""
        self.applied.clear()
        self._weights = 0.0
        while self._unacknowledged:
            self._unacknowledged.pop(0)()

    def give_up(self) -> None:
        """Its steps are gone back on."""
        self.applied.clear()
        self.conflict = ""
        self._weights = 0.0
        self._unacknowledged.clear()
