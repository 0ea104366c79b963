"""Checkpoints in the background: the trainer waits only for the copy of its state, and for the
previous checkpoint."""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import structlog
import torch.distributed as dist

from shoal.checkpoint import reading, storage, writing
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath, located
from shoal.checkpoint.interface import WrittenCheckpoint
from shoal.checkpoint.peers import ALONE, GroupPeers, Peers
from shoal.state.shards import Needs, StateShard
from shoal_proto.errors import CheckpointFailed, GenerationBroken, InvalidSpec
from shoal_proto.numbers_given import as_index, as_number

log = structlog.get_logger(__name__)


LIMIT_S = 1800.0


def _any(name: str) -> bool:
    return True


class Checkpoints:
    """Writer of checkpoints into one directory: one at a time, on a background thread.

    Each rank of a job has a `Checkpoints` with the same settings. The directory must be on storage
    that all ranks share; it may be the URL of a bucket, such as `s3://bucket/prefix`. Memory: a
    copy of the shards that this rank writes, and a chunk of up to 64 MiB, or a row if that is
    larger.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | BucketPath,
        *,
        every_steps: int,
        keep: int = 3,
        limit_s: float = LIMIT_S,
    ) -> None:
        """Set up checkpoints every `every_steps` steps.

        `keep`: the number of complete checkpoints to keep. A checkpoint that takes longer than
        `limit_s` seconds has failed. Raises InvalidSpec for `every_steps` or `keep` below one, a
        `limit_s` not above zero, and an unsupported URL.
        """
        every_steps = as_index("every_steps", every_steps, least=1)
        keep = as_index("keep", keep, least=1)
        limit_s = as_number("limit_s", limit_s)
        if not limit_s > 0:
            raise InvalidSpec("limit_s is out of range", seen=f"{limit_s:g}", expected="above 0")
        self.directory = located(directory)
        self.every_steps = every_steps
        self.keep = keep
        self._limit_s = limit_s
        self._until_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failed_to_step = 0
        """Newest step that other ranks tried to write while this rank wrote an earlier one; else
        0."""
        self._continues = False
        self._peers: Peers = ALONE
        self._complete: Mapping[int, CheckpointPath] = {}
        self.written: WrittenCheckpoint | None = None
        """The newest checkpoint that this object has written, if there is any. Thread-safe."""

    # --- called by a strategy: see `shoal.checkpoint.interface` ---

    def probe(self) -> None:
        storage.check(self.directory)

    def steps(self) -> Collection[int]:
        self._complete = storage.complete(self.directory)
        return self._complete.keys()

    def location(self, step: int) -> str:
        return str(self._path(step))

    def read(self, step: int, needs: Needs) -> StateShard:
        path = self._path(step)
        state_shard = reading.read(path, needs)
        if state_shard.step < step:
            raise InvalidSpec(
                f"the checkpoint {path} is of an earlier step than its name says",
                seen=f"step {state_shard.step}; 0 if its entry step is missing or not an int",
                expected=f"step {step}, or else this run would not be allowed to write beside it",
                fix="Save it with the entry step (docs/checkpoints.md), or move it to another"
                " directory and load its weights before session.distribute.",
            )
        return state_shard

    def _path(self, step: int) -> CheckpointPath:
        return self._complete.get(step) or storage.path_of_step(self.directory, step)

    def select_writers(self, world_size: int) -> None:
        self._peers = GroupPeers(dist.new_group()) if world_size > 1 else ALONE
        self._failed_to_step = 0

    # --- called by strategies and scripts ---

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is to be written after `step` committed steps."""
        return step > 0 and step % self.every_steps == 0

    def newest(self) -> CheckpointPath | None:
        """Return the path of the newest complete checkpoint, if there is any. Raises InvalidSpec if
        listing fails, and OSError if it may succeed later."""
        return storage.newest(self.directory)

    def begin_write(
        self,
        state_shard: StateShard,
        peers: Peers | None = None,
        writes: Callable[[str], bool] = _any,
    ) -> None:
        """Write a checkpoint of this rank's state shard in the background.

        Call it on all ranks after the same step. Waits for the previous checkpoint first. Once this
        returns, the script is free to change the shard's tensors.

        `peers`: the ranks that write together; None: those of the last `select_writers`, else this
        rank alone. A tensor shard for whose name `writes` returns False is not copied: another rank
        must write it.

        If the previous checkpoint failed, raises its error, on every rank at the same step, and
        writes nothing; the next call tries again. The error is CheckpointFailed, with the path, and
        the errno if there is one. Before the first success the error is InvalidSpec if the ranks
        together did not hold a whole state, or if later checkpoints exist. Raises CheckpointFailed,
        perhaps not on all ranks, if the previous checkpoint exceeds its limit. If only some ranks
        then write a checkpoint, that checkpoint and the next one fail.

        If a rank was lost meanwhile, no error is raised; the checkpoint may be complete or absent.
        `written` says if this rank knows that it is complete.
        """
        self.finish_write()
        if state_shard.step <= self._failed_to_step:
            # Skip this checkpoint, so that all ranks begin the next one.
            log.warning("checkpoint_skipped", step=state_shard.step, reason="other ranks failed")
            return
        shards = {name: shard for name, shard in state_shard.shards.items() if writes(name)}
        # Other ranks must write what this rank leaves out: else the write fails.
        elsewhere = (state_shard.elsewhere | state_shard.shards.keys()) - shards.keys()
        copied_shard = replace(state_shard, shards=shards, elsewhere=elsewhere).copied()
        self._thread = threading.Thread(
            target=self._write,
            args=(copied_shard, peers or self._peers),
            name=f"shoal-checkpoint-{state_shard.step}",
            # Storage that never answers must not keep the process alive.
            daemon=True,
        )
        self._until_s = time.monotonic() + self._limit_s
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish_write()

    def finish_write(self) -> None:
        """Wait for the checkpoint in progress until its limit. Raises what `begin_write` raises.
        May be called twice."""
        if self._thread:
            left_s = self._until_s - time.monotonic()
            self._thread.join(min(max(0.0, left_s), threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                raise CheckpointFailed(
                    f"a checkpoint in {self.directory} is still being written",
                    seen=f"{self._thread.name}, which began more than {self._limit_s:g} s ago",
                    expected=f"a complete checkpoint within limit_s={self._limit_s:g}",
                    fix="Check that the storage answers. If it is slow, set a larger limit_s.",
                    details={"path": str(self.directory)},
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def _write(self, state_shard: StateShard, peers: Peers) -> None:
        path = storage.path_of_step(self.directory, state_shard.step)
        try:
            num_bytes = writing.write(
                path,
                state_shard,
                peers,
                continues=self._continues,
                published=partial(self._retire, state_shard.step),
            )
            self._continues = True
            self.written = WrittenCheckpoint(state_shard.step, num_bytes)
            (log.info if peers.rank == writing.FIRST else log.debug)(
                "checkpoint_written", path=str(path), num_bytes=state_shard.num_bytes
            )
        except GenerationBroken as error:
            # Other ranks may have completed it: the next write must not refuse it.
            self._continues = True
            log.warning("checkpoint_abandoned", path=str(path), reason=str(error))
        except InvalidSpec as error:
            # After an earlier success, the storage may have failed.
            self._failure = _failed(path, error) if self._continues else error
        except CheckpointFailed as error:
            self._failed_to_step = int(error.details.get(writing.NEWEST_STEP, 0))
            self._failure = error
        except BaseException as error:  # noqa: BLE001 - raised by `finish_write`
            self._failure = error

    def _retire(self, step: int) -> None:
        try:
            storage.retire(self.directory, step, self.keep)
        except (InvalidSpec, OSError) as error:
            # The next `_retire` tries again.
            log.warning("checkpoint_not_retired", path=str(self.directory), error=str(error))


def _failed(path: CheckpointPath, error: InvalidSpec) -> CheckpointFailed:
    return CheckpointFailed(
        f"the checkpoint {path} could not be written: {error.what}",
        seen=error.seen,
        expected=error.expected,
        fix=error.fix,
        details={"path": str(path)},
    )
