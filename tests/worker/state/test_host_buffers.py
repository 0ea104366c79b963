"""What a rank shows of the snapshots that it keeps."""

import torch

from shoal.state.host_buffers import Slot
from shoal.state.shards import Holding, Piece


def travels(name: str) -> bool:
    return True


def test_a_snapshot_is_shown_only_once_all_names_of_its_step_are_known() -> None:
    """A peer that was lost before it told its own may have had what no other rank has."""
    own = {"model.a": Piece.whole(torch.ones(3))}
    slot = Slot()
    slot.take(Holding(step=1, pieces=own), travels)
    assert slot.shown() == []
    slot.know(frozenset({"model.a", "optim.b/exp_avg"}))
    (shown,) = slot.shown()
    assert shown.elsewhere == {"model.a", "optim.b/exp_avg"}
    slot.clear()
    slot.take(Holding(step=2, pieces=own), travels)
    assert slot.shown() == []


def test_a_snapshot_that_comes_with_all_names_is_shown_at_once() -> None:
    """As the one with which a generation begins."""
    own = {"model.a": Piece.whole(torch.ones(3))}
    slot = Slot()
    slot.take(Holding(step=0, pieces=own, elsewhere=frozenset({"model.b"})), travels)
    assert [holding.step for holding in slot.shown()] == [0]
