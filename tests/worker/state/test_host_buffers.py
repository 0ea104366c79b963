"""Snapshots that a rank keeps, as it shows them."""

import pytest
import torch

from shoal.state import host_buffers
from shoal.state.host_buffers import HostBuffer, StepCopies
from shoal.state.inventory import inventory_of
from shoal.state.shards import StateShard, TensorShard

ONES = torch.ones(3)


def take(slot: StepCopies, state_shard: StateShard) -> None:
    slot.begin_own_copy(state_shard, inventory_of([state_shard]), lambda _: True)


def test_a_snapshot_is_shown_only_once_all_names_of_its_step_are_known() -> None:
    """A peer lost before it sent its names may have held tensors that no other rank has."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    take(slot, StateShard(step=1, shards=own))
    assert slot.complete_copies() == []
    slot.record_names(frozenset({"model.a", "optim.b/exp_avg"}))
    (shown,) = slot.complete_copies()
    assert shown.elsewhere == {"model.a", "optim.b/exp_avg"}
    slot.clear()
    take(slot, StateShard(step=2, shards=own))
    assert slot.complete_copies() == []


def test_a_snapshot_that_comes_with_all_names_is_shown_at_once() -> None:
    """A generation begins with such a snapshot."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    take(slot, StateShard(step=0, shards=own, elsewhere=frozenset({"model.b"})))
    assert [state_shard.step for state_shard in slot.complete_copies()] == [0]


def test_memory_that_could_not_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer whose memory is missing must not count as arranged."""
    inventory = inventory_of([StateShard(step=1, shards={"model.a": TensorShard.whole(ONES)})])
    buffer = HostBuffer()

    def fails(*_: object) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(host_buffers, "host_memory", fails)
        buffer.arrange(inventory, lambda _: True)
    shards, memory = buffer.arrange(inventory, lambda _: True)
    assert list(shards) == ["model.a"]
    assert memory.numel() == 64
