"""Which samples a checkpoint's step stands for, and whether a run goes on with the same.

A step is a position in the order of samples, and that order follows from the fields here: with
another batch size, say, the same number of steps is behind other samples.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from shoal.state.shards import StateShard
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

SAMPLES = "samples"
"""Where the fields stand in a state's values."""
MUST_MATCH = ("global_batch", "dataset", "seed", "shuffle", "order")
"""Not the number of epochs: the order of one does not depend on how many there are."""


def with_samples(state_shard: StateShard, samples: Mapping[str, str]) -> StateShard:
    """The holding, telling which samples its step stands for."""
    if not samples:
        return state_shard
    return replace(state_shard, values={**state_shard.values, SAMPLES: dict(samples)})


def check_samples(path: Path, state_shard: StateShard, samples: Mapping[str, str]) -> None:
    """Raise InvalidSpec unless the state read from `path` stands amid these samples.

    What tells nothing of them (earlier versions of Shoal, plain torch) cannot be compared, and
    neither can a run whose script takes its batches from elsewhere: `samples` is empty then.
    """
    written: Any = state_shard.values.get(SAMPLES)
    if not isinstance(written, dict):
        if state_shard.step and samples:
            log.warning("checkpoint_without_samples", path=str(path), step=state_shard.step)
        return
    for field in MUST_MATCH:
        if field in written and field in samples and written[field] != samples[field]:
            raise InvalidSpec(
                f"the checkpoint {path} was written amid other samples: {field} differs",
                seen=f"{field}={samples[field]}",
                expected=f"{field}={written[field]}, as in the run that it is of",
                fix="With the same batches training goes on where it was, for more epochs too. To"
                " start anew, take another directory for the checkpoints; to begin with these"
                " weights there, load them into the model before session.distribute"
                " (docs/checkpoints.md).",
                details={field: f"{samples[field]!r}, checkpoint {written[field]!r}"},
            )
