"""The outer step at the end of a round: taken by all members, or by the parameter servers."""

from dataclasses import dataclass

from torch import Tensor

from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_number


@dataclass(frozen=True, kw_only=True)
class OuterStep:
    """SGD step along the change of a round, which replaces a negative gradient."""

    lr: float = 1.0
    """Outer learning rate; 1 without momentum gives the mean of all members' parameters."""
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "momentum"):
            object.__setattr__(self, name, as_number(f"outer_{name}", getattr(self, name)))
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise InvalidSpec(
                "the outer step is out of range",
                seen=f"lr={self.lr} momentum={self.momentum}",
                expected="lr above 0, momentum from 0 to below 1",
            )
        if self.nesterov and not self.momentum:
            raise InvalidSpec(
                "Nesterov's step needs a momentum", seen="momentum=0.0", expected="above 0"
            )

    def change(self, mean: Tensor, velocity: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the change to apply, and the new velocity (None without momentum).

        `mean`: the members' mean change.
        """
        if not self.momentum:
            return mean * self.lr, None
        velocity = mean.clone() if velocity is None else velocity * self.momentum + mean
        ahead = mean + velocity * self.momentum if self.nesterov else velocity
        return ahead * self.lr, velocity
