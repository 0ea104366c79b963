"""Workers whose steps push to parameters and to a table, and checks of snapshots of both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from history.events import Gradients, now_s
from history.rows import RowClient, RowHistory, RowWork
from history.twin import FIRST_VALUES_SEED, Twin, checksum
from history.values import Values
from history.workers import OPTIMIZERS, PARAMETERS, Success

from shoal_client.parameters.job_shards import JointStep
from shoal_client.shards.layouts import of_tables
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard, ShardMap

LR = [0.1, 0.01]


@dataclass(frozen=True, kw_only=True)
class DensePushed:
    """An acknowledged push of parameters."""

    session: str
    sequence: int
    gradients: Gradients
    versions: Mapping[int, int]
    """Version that the push made, by shard."""


@dataclass(frozen=True, kw_only=True)
class StepWork(RowWork):
    """Settings that all workers of a run share, and their acknowledged pushes of parameters."""

    optimizer: OptimizerSpec = field(default_factory=lambda: OPTIMIZERS["adam"])
    dense: list[DensePushed] = field(default_factory=list, repr=False)


class StepClient(RowClient):
    """A client whose pushes are joint steps: rows and parameters, in sequence or at once."""

    def __init__(self, work: StepWork, session: str, token: Callable[[], Token]) -> None:
        super().__init__(work, session, token)
        self._step_work = work
        self.layout = self._client.fetch_map()
        self._values, self._gradients = Values(self.layout), Values(self.layout)
        self._values.draw(FIRST_VALUES_SEED)
        self._parameters.create(work.optimizer, self._values.buffers())
        self._parameters.pull(self._values.buffers())
        self._pool = ThreadPoolExecutor(1)

    def push(self, ids: Sequence[int], rng: np.random.Generator) -> Success:
        """Push rows first, parameters first, or both at once; a snapshot must allow for each."""
        parts, gradients = self.drawn(ids, rng), Gradients(seed=int(rng.integers(2**32)), lr=LR)
        step = self.joint_step(self._client.shard_ids(parts))
        sent_s = now_s()
        match int(rng.integers(3)):
            case 0:
                self.push_rows(parts, step)
                self.push_parameters(gradients, step)
            case 1:
                self.push_parameters(gradients, step)
                self.push_rows(parts, step)
            case _:
                rows = self._pool.submit(self.push_rows, parts, step)
                self.push_parameters(gradients, step)
                rows.result()
        return Success(sent_s, now_s(), 0)

    def joint_step(self, rows_in: Sequence[int]) -> JointStep:
        return self._parameters.joint_step(rows_in)

    def push_parameters(self, gradients: Gradients, step: JointStep) -> None:
        self._gradients.draw(gradients.seed)
        result = self._parameters.push(
            self._gradients.buffers(), lr=gradients.lr, into=self._values.buffers(), step=step
        )
        pushed = DensePushed(
            session=self._session,
            sequence=result.sequence,
            gradients=gradients,
            versions=dict(result.versions),
        )
        with self._work.history.lock:
            self._step_work.dense.append(pushed)

    def parameters(self) -> Mapping[int, tuple[int, int]]:
        """Current version and checksum of each shard of parameters."""
        self._parameters.pull(self._values.buffers())
        return {
            shard_id: (version, checksum(self._values.of_shard(shard_id)))
            for shard_id, version in self._parameters.versions.items()
        }

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


def cut(work: StepWork, layout: ShardMap, versions: Mapping[int, int]) -> tuple[StepWork, int]:
    """The part of the run that a snapshot with these versions contains, and its number of steps.

    Raises AssertionError if a step is in the snapshot in part.
    """
    shards = of_tables(layout)
    sides: dict[tuple[str, int], set[bool]] = {}
    kept = StepWork(**{**vars(work), "history": RowHistory(), "dense": []})
    for pushed in work.dense:
        inside = {version <= versions[shard_id] for shard_id, version in pushed.versions.items()}
        sides.setdefault((pushed.session, pushed.sequence), set()).update(inside)
        if inside == {True}:
            kept.dense.append(pushed)
    for where, parts in work.history.pushed.items():
        for part in parts:
            is_in = part.version <= versions[shards[where].shard_id]
            sides.setdefault((part.session, part.sequence), set()).add(is_in)
            if is_in:
                kept.history.pushed.setdefault(where, []).append(part)
    torn = [step for step, seen in sides.items() if len(seen) > 1]
    assert not torn, f"{torn} are in the snapshot in part, of {len(sides)} steps"
    return kept, sum(seen == {True} for seen in sides.values())


def compare_parameters(
    work: StepWork, shards: Iterable[Shard], seen: Mapping[int, tuple[int, int]]
) -> None:
    """Compare each shard with a serial replay of the run's pushes in torch, to the last bit.

    `seen` is the result of `StepClient.parameters`. Raises AssertionError if they differ.
    """
    for shard in shards:
        twin, version = Twin(shard, work.optimizer), 1
        for pushed in sorted(work.dense, key=lambda each: each.versions[shard.shard_id]):
            version += 1
            assert pushed.versions[shard.shard_id] == version, (shard.shard_id, pushed)
            twin.apply(pushed.gradients)
        assert seen[shard.shard_id] == (version, twin.checksum()), f"shard {shard.shard_id}"


__all__ = ["PARAMETERS", "StepClient", "StepWork", "compare_parameters", "cut"]
