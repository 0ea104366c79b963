"""Interface through which a strategy uses a script's checkpoints."""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from shoal.state.shards import Needs, StateShard


class WrittenCheckpoint(NamedTuple):
    """Step of a complete checkpoint, and bytes of all ranks' entries."""

    step: int
    num_bytes: int


class CheckpointStore(Protocol):
    """Checkpoints of a job, as one rank uses them. Implemented by `Checkpoints`."""

    written: WrittenCheckpoint | None
    """The newest checkpoint that this process has written, if there is any. Thread-safe."""

    def probe(self) -> None:
        """Raise InvalidSpec for a bucket that cannot store checkpoints, and OSError if a later
        check may succeed. A directory is not tested."""

    def steps(self) -> Collection[int]:
        """List the steps of complete checkpoints in the storage. Raises InvalidSpec if that fails,
        and OSError if it may succeed later."""

    def location(self, step: int) -> str:
        """Return the location of the step's checkpoint, for messages."""

    def read(self, step: int, needs: Needs) -> StateShard:
        """Read the chunks that `needs` asks for. Raises what `reading.read` raises, and InvalidSpec
        for a checkpoint of an earlier step."""

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is to be written after `step` committed steps."""

    def select_writers(self, world_size: int) -> None:
        """Select the ranks that write later checkpoints: this rank alone if `world_size` is 1, else
        all ranks of the default group. Collective in the latter case."""

    def begin_write(self, state_shard: StateShard, *, writes: Callable[[str], bool]) -> None:
        """Write a checkpoint in the background; see `Checkpoints`."""

    @property
    def is_writing(self) -> bool:
        """True if a checkpoint is being written."""

    def finish_write(self) -> None:
        """Wait for the checkpoint; see `Checkpoints`."""
