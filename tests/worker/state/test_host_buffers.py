"""What a rank shows of the snapshots that it keeps."""

import torch

from shoal.state.host_buffers import StepCopies
from shoal.state.shards import StateShard, TensorShard


def travels(name: str) -> bool:
    return True


def test_a_snapshot_is_shown_only_once_all_names_of_its_step_are_known() -> None:
    """A peer that was lost before it told its own may have had what no other rank has."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    slot.take(StateShard(step=1, shards=own), travels)
    assert slot.shown() == []
    slot.know(frozenset({"model.a", "optim.b/exp_avg"}))
    (shown,) = slot.shown()
    assert shown.elsewhere == {"model.a", "optim.b/exp_avg"}
    slot.clear()
    slot.take(StateShard(step=2, shards=own), travels)
    assert slot.shown() == []


def test_a_snapshot_that_comes_with_all_names_is_shown_at_once() -> None:
    """As the one with which a generation begins."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    slot.take(StateShard(step=0, shards=own, elsewhere=frozenset({"model.b"})), travels)
    assert [state_shard.step for state_shard in slot.shown()] == [0]
