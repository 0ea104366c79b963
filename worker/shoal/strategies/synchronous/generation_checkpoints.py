"""Checkpoints of synchronous strategies: which one to start from, and when to write one."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog
import torch.distributed as dist
from torch.optim import Optimizer

from shoal.backends.abortable.gather import gather
from shoal.checkpoint.interface import CheckpointStore, WrittenCheckpoint
from shoal.checkpoint.samples import TrainedSamples
from shoal.membership.generation import Generation
from shoal.model.same_optimizer import replaced_settings
from shoal.state.optimizer_state import settings_of
from shoal.state.shards import Needs, StateShard
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal_proto.errors import CheckpointFailed, StateLost, Unavailable
from shoal_proto.v1 import membership_pb2 as pb

log = structlog.get_logger(__name__)

Writes = Callable[[str], bool]
MAX_CHECKPOINTS_NAMED = 100
MAX_SETTINGS_NAMED = 8


class GenerationCheckpoints:
    """A member's part in the job's checkpoints; does nothing if the script asked for none."""

    def __init__(self, position: ScriptPosition) -> None:
        self._position = position
        self._checkpoints: CheckpointStore | None = None
        self.samples = TrainedSamples({}, None, moves=False)
        self._is_rank_0 = False
        self.owed_step = 0
        """The latest step, if a checkpoint is to be written once the script has finished it."""
        self._begun_step = 0
        """Step of the newest checkpoint that was begun and has not failed."""
        self.failure: CheckpointFailed | None = None

    def set_store(self, checkpoints: CheckpointStore) -> None:
        """Set the store to write to and to start from. Called first.

        Raises InvalidSpec for a bucket that cannot store checkpoints, and Unavailable if it may be
        able to later; a directory is not tested.
        """
        with _unavailable():
            checkpoints.probe()
        self._checkpoints = checkpoints

    def set_samples(self, samples: TrainedSamples) -> None:
        """Set the description of the order of samples, for each checkpoint."""
        self.samples = samples

    def select_writers(self, world_size: int) -> None:
        """Form the group in which members write checkpoints, if any. Collective."""
        if self._checkpoints is not None:
            self._checkpoints.select_writers(world_size)

    def enters(self) -> None:
        """Tell the others, as a generation begins, if this member's last one owed a checkpoint: one
        that was due is not begun, or is not known to be complete."""
        begun = 0 if self.is_written(self._begun_step) else self._begun_step
        self._position.owed_checkpoint = max(self.owed_step, begun)

    def entered(self, step: int) -> None:
        """Owe a checkpoint of the generation's first step, on all members, if one of them owed one
        before. Without the state of its step, it becomes due again."""
        self.owed_step = step if 0 < self._position.owed_checkpoint <= step else 0
        if self.owed_step:
            self._position.checkpoint_at = step

    def steps(self) -> Sequence[int]:
        """Return the steps of the newest 100 complete checkpoints that this member sees.

        Raises InvalidSpec if the storage cannot be listed, and Unavailable if it may be later.
        """
        if self._checkpoints is None:
            return ()
        with _unavailable():
            return sorted(self._checkpoints.steps())[-MAX_CHECKPOINTS_NAMED:]

    def newest(self, generation: Generation, group: dist.ProcessGroup) -> int | None:
        """Return the step of the newest complete checkpoint that every member sees, or None.

        Collective. Raises StateLost on all members if the generation needs one and there is none,
        and InvalidSpec if the storage cannot be listed, or OSError if it may be later.
        """
        self._is_rank_0 = generation.rank == 0
        needed = generation.me.state == pb.STATE_ACTION_CHECKPOINT
        own = self._checkpoints.steps() if self._checkpoints is not None else ()
        if self._checkpoints is None and not needed:
            return None
        messages = gather(json.dumps(sorted(own)).encode(), group)
        common: set[int] = set.intersection(*(set(json.loads(each)) for each in messages))
        if common:
            return max(common)
        if needed:
            raise StateLost(
                "no member holds the state that the job had reached, and no checkpoint is"
                " seen by all",
                seen="; ".join(f"rank {rank}: {json.loads(e)}" for rank, e in enumerate(messages)),
                expected="a complete checkpoint that every member sees",
                fix="Run the job with --fresh to start from step 0.",
            )
        return None

    def read(self, step: int, needs: Needs, fresh: Optimizer | None = None) -> StateShard:
        """Read this member's part of the checkpoint of that step.

        `fresh`: an optimizer as the script has made it, to log settings that the checkpoint
        replaces. Raises what `shoal.checkpoint.reading.read` raises, and InvalidSpec for a job on
        other samples.
        """
        assert self._checkpoints is not None
        self._position.owed_checkpoint, self._begun_step = 0, 0
        state_shard, path = self._checkpoints.read(step, needs), self._checkpoints.location(step)
        self.samples.resume(path, state_shard)
        settings = settings_of(state_shard.values)
        changed = replaced_settings(fresh, settings) if fresh is not None else []
        if changed and self._is_rank_0:
            log.warning(
                "settings_from_checkpoint",
                path=path,
                settings="; ".join(changed[:MAX_SETTINGS_NAMED]),
                num_settings=len(changed),
                hint="training continues with the checkpoint's settings; to use others, set them"
                " in the loop on every member, such as optimizer.param_groups[0]['lr']"
                " (docs/checkpoints.md)",
            )
        log.info("checkpoint_read", path=path, step=state_shard.step)
        return state_shard

    def write(self, step: int, state_shard: Callable[[], StateShard], writes: Writes) -> None:
        """Write a checkpoint if one is due after this many committed steps.

        Waits for the previous one; writes none if that is still being written at its time limit.
        Raises InvalidSpec if `Checkpoints.begin_write` does.
        """
        checkpoints = self._checkpoints
        if checkpoints is not None and self.is_due(step):
            try:
                self.finish_write()
            except CheckpointFailed as error:
                # A full disk does not stop training: only the error of the last checkpoint is
                # raised.
                log.error("checkpoint_failed", **_described(error))
                if checkpoints.is_writing:
                    return
            self._begun_step = step
            checkpoints.begin_write(self.samples.add_to_shard(state_shard()), writes=writes)

    def write_alone(self, step: int, state_shard: Callable[[], StateShard]) -> None:
        """Write a checkpoint of the whole state, which this member holds, and wait as `conclude`
        does.
        """
        if self._checkpoints is None or self.is_written(step):
            return
        self._checkpoints.select_writers(1)
        self._position.checkpoint_at = step
        self.write(step, state_shard, lambda _: True)
        self.conclude()

    @property
    def written(self) -> WrittenCheckpoint | None:
        """The newest checkpoint that was written, if any. Thread-safe."""
        return self._checkpoints.written if self._checkpoints is not None else None

    def is_written(self, step: int) -> bool:
        """True if this member knows of a complete checkpoint of this step or a later one; also for
        step 0, which has none."""
        return step <= (self.written.step if self.written else 0)

    def is_due(self, step: int) -> bool:
        """True if a checkpoint of the state after this many steps is to be written."""
        checkpoints = self._checkpoints
        is_last = step > 0 and self._position.checkpoint_at == step
        return checkpoints is not None and (is_last or checkpoints.is_due(step))

    @property
    def is_enabled(self) -> bool:
        """True if the script asked for checkpoints."""
        return self._checkpoints is not None

    def conclude(self) -> None:
        """Wait until a checkpoint in progress is written, has failed or exceeds its time limit.

        A failure is kept in `failure`.
        """
        try:
            self.finish_write()
        except CheckpointFailed as error:
            log.error("checkpoint_failed", **_described(error))
            self.failure = error

    def finish_write(self) -> None:
        """Wait for the checkpoint in progress, and raise its error."""
        if self._checkpoints is not None:
            try:
                self._checkpoints.finish_write()
            except CheckpointFailed:
                # It is not owed: the next one that is due tries again.
                self._begun_step = 0
                raise


@contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            "the storage of checkpoints does not answer as it should", seen=str(error)
        ) from error


def _described(error: CheckpointFailed) -> dict[str, str]:
    return {"path": error.details.get("path", ""), "reason": str(error)}
