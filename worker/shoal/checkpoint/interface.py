"""What a strategy needs of the checkpoints that a script asked for."""

from collections.abc import Callable, Collection
from typing import Protocol

from shoal.state.shards import Needs, StateShard


class CheckpointStore(Protocol):
    """One rank's view of the checkpoints of a job. `Checkpoints` is the one there is."""

    written_step: int | None
    """The step of the newest checkpoint that was written. Any thread."""

    def probe(self) -> None:
        """Raise InvalidSpec if no checkpoint can be kept here, before one is due."""

    def steps(self) -> Collection[int]:
        """Steps of the complete checkpoints, looked up anew. Raises InvalidSpec if the storage
        cannot be looked into."""

    def location(self, step: int) -> str:
        """Where the checkpoint of that step is, for people."""

    def read(self, step: int, needs: Needs) -> StateShard:
        """The chunks that `needs` asks for, of the checkpoint of that step."""

    def due(self, step: int) -> bool:
        """True if a checkpoint is to be written after so many committed steps."""

    def join(self, world_size: int) -> None:
        """Write together with all ranks of the default group from now on; alone if it has one.
        Collective."""

    def leave(self) -> None:
        """Write alone from now on."""

    def offer(self, state_shard: StateShard, *, writes: Callable[[str], bool]) -> None:
        """Have a checkpoint written of what this rank holds; see `Checkpoints.offer`."""

    @property
    def is_writing(self) -> bool:
        """True if a checkpoint is being written."""

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointFailed."""
