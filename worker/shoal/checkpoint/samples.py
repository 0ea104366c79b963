"""Check that a run continues a checkpoint with the same samples, in the same order.

A run with another batch size continues at the checkpoint's next sample, and records where the size
changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from typing import Any

import structlog

from shoal.data.order import CONTENT_FIELD, Order, SamplePosition
from shoal.state.shards import Json, StateShard
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

SAMPLES = "samples"
ORIGIN = "origin"
"""Key of the position from which batches have their present size."""
MUST_MATCH = ("dataset", "seed", "shuffle", "order")
"""Fields that must match. The number of epochs may differ: it does not change an epoch's order."""
BATCH_SIZE = ("global_batch", "drop_last")


class TrainedSamples:
    """The samples that a run trains on."""

    def __init__(self, samples: Mapping[str, str], order: Order | None, *, moves: bool) -> None:
        """`samples`: the proposal's fields about the samples; empty if the script makes its own
        batches. `moves`: True if the run is allowed another batch size than the checkpoint's."""
        self._samples = samples
        self._order = order
        self._moves = moves
        self.origin = SamplePosition()
        """Position from which batches have their present size."""

    @property
    def are_known(self) -> bool:
        """True if the session hands out the batches."""
        return bool(self._samples)

    def add_to_shard(self, state_shard: StateShard) -> StateShard:
        """Return the state shard with fields and position in its values."""
        if not self._samples:
            return state_shard
        return self.add_position(
            replace(state_shard, values={**state_shard.values, SAMPLES: dict(self._samples)})
        )

    def add_position(self, state_shard: StateShard) -> StateShard:
        """Return the state shard with the position of a change of batch size, if there was any."""
        if self.origin == SamplePosition():
            return state_shard
        origin: list[Json] = list(astuple(self.origin))
        return replace(state_shard, values={**state_shard.values, ORIGIN: origin})

    def adopt(self, state_shard: StateShard) -> None:
        """Adopt the position of the last change of batch size from another member's state."""
        self.origin = _origin_of(state_shard.values)

    def resume(self, path: str, state_shard: StateShard) -> None:
        """Continue from a checkpoint, at its next sample. Raises InvalidSpec for other samples, or
        a position that cannot be read."""
        must_match = MUST_MATCH if self._moves else (*MUST_MATCH, *BATCH_SIZE)
        check_samples(path, state_shard, self._samples, must_match)
        try:
            self.adopt(state_shard)
        except (TypeError, ValueError) as error:
            raise _unreadable(path, ORIGIN, state_shard.values) from error
        written: Any = state_shard.values.get(SAMPLES)
        self._warn_of_other_content(path, written)
        if self._order is None or not isinstance(written, dict):
            return
        before = {key: written.get(key, "") for key in BATCH_SIZE}
        if before == {key: self._samples.get(key, "") for key in BATCH_SIZE}:
            return
        try:
            size = int(before["global_batch"])
        except (TypeError, ValueError) as error:
            raise _unreadable(path, "global_batch", written) from error
        former = replace(
            self._order,
            global_batch_size=size,
            drop_last=before["drop_last"] == "true",
            origin=self.origin,
        )
        self.origin = former.position(state_shard.step)
        log.info("batch_size_changed", path=path, was=before["global_batch"], **vars(self.origin))

    def _warn_of_other_content(self, path: str, written: object) -> None:
        # Raise no error: a script is allowed to continue with corrected labels.
        before = written.get(CONTENT_FIELD) if isinstance(written, dict) else None
        now = self._samples.get(CONTENT_FIELD)
        if before and now and before != now:
            log.warning(
                "checkpoint_of_other_samples",
                path=path,
                hint="the data set has the same size as before, but other samples: samples of a"
                " validation part may be among them now, unless the split is seeded",
            )


def _unreadable(path: str, field: str, values: Mapping[str, Any]) -> InvalidSpec:
    return InvalidSpec(
        f"the position of the checkpoint {path} in the samples cannot be read",
        seen=f"{field}={values[field]!r:.200}" if field in values else f"no field {field}",
        fix="Continue from another checkpoint, or start over in another directory.",
    )


def _origin_of(values: Mapping[str, Any]) -> SamplePosition:
    origin = values.get(ORIGIN)
    return SamplePosition(*map(int, origin)) if origin else SamplePosition()


def check_samples(
    path: str,
    state_shard: StateShard,
    samples: Mapping[str, str],
    must_match: Iterable[str],
) -> None:
    """Raise InvalidSpec if the state was written with other samples. Nothing is compared for a
    checkpoint of plain torch, or without `samples`."""
    written: Any = state_shard.values.get(SAMPLES)
    if not isinstance(written, dict):
        if state_shard.step and samples:
            log.warning("checkpoint_without_samples", path=path, step=state_shard.step)
        return
    for field in must_match:
        if field in written and field in samples and written[field] != samples[field]:
            raise InvalidSpec(
                f"the checkpoint {path} was written with other samples: {field} differs",
                seen=f"{field}={samples[field]}",
                expected=f"{field}={written[field]}, as in the run that wrote it",
                fix="With the same batches, training continues where it stopped, also for more"
                " epochs. To start over, use another directory for the checkpoints. To start there"
                " with these weights, load them into the model before session.distribute"
                " (docs/checkpoints.md).",
                details={field: f"{samples[field]!r}, checkpoint {written[field]!r}"},
            )
