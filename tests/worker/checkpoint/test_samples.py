"""Fields about the samples in a checkpoint, as a stranger may have written them."""

import pytest

from shoal.checkpoint.samples import ORIGIN, SAMPLES, TrainedSamples
from shoal.data.order import Order
from shoal.state.shards import Json, StateShard
from shoal_proto.errors import InvalidSpec

OWN = {"global_batch": "4", "drop_last": "false"}


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({SAMPLES: {"drop_last": "true"}}, "no field global_batch"),
        ({SAMPLES: {**OWN, "global_batch": "four"}}, "global_batch='four'"),
        ({SAMPLES: {**OWN, "global_batch": None}}, "global_batch=None"),
        ({SAMPLES: {**OWN}, ORIGIN: 7}, "origin=7"),
        ({SAMPLES: {**OWN}, ORIGIN: ["a", 0, 0]}, "origin=['a', 0, 0]"),
        ({SAMPLES: {**OWN}, ORIGIN: [1, 2, 3, 4]}, "origin=[1, 2, 3, 4]"),
    ],
)
def test_a_checkpoint_whose_position_cannot_be_read_is_refused(
    values: dict[str, Json], seen: str
) -> None:
    order = Order(num_samples=24, global_batch_size=4)
    samples = TrainedSamples(OWN, order, moves=True)
    with pytest.raises(InvalidSpec, match=r"/runs/a .*cannot be read") as refused:
        samples.resume("/runs/a", StateShard(step=2, shards={}, values=values))
    assert refused.value.seen == seen
