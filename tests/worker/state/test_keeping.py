"""What a member offers after a loss: nothing that could be taken for a whole state and is none."""

import torch

from shoal.state.keeping import Keeping
from shoal.state.pieces import Holding, Piece
from shoal.state.shelves import Slot

ME, OTHERS = frozenset({"a"}), frozenset({"b", "c"})


def holding(step: int, *names: str, elsewhere: tuple[str, ...] = ()) -> Holding:
    pieces = {name: Piece.whole(torch.ones(2)) for name in names}
    return Holding(step=step, pieces=pieces, elsewhere=frozenset(elsewhere))


def kept(started: Holding, live: Holding) -> Keeping:
    """A member of three, without copies, after a generation."""
    keeping = Keeping(copies=0, every_steps=1)
    keeping.start(started, ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    keeping.stop(live)
    return keeping


def test_a_live_state_is_no_use_where_nobody_knows_what_a_lost_member_held() -> None:
    """The optimizer's state came with the first step; of its names a lost owner's are unknown."""
    keeping = kept(holding(0, "model.w"), holding(1, "model.w", "optim.w/m"))
    assert keeping.held(ME | {"b"}) == []


def test_a_live_state_counts_where_all_members_are_still_there() -> None:
    live = holding(1, "model.w", "optim.w/m")
    assert [own.step for own in kept(holding(0, "model.w"), live).held(ME | OTHERS)] == [1]


def test_a_live_state_says_what_else_there_was_at_its_start() -> None:
    started = holding(8, "model.w", "optim.w/m", elsewhere=("optim.v/m",))
    (own,) = kept(started, holding(9, "model.w", "optim.w/m")).held(ME)
    assert own.elsewhere == {"optim.v/m"}


def test_a_snapshot_shows_once_it_is_known_what_else_there_was() -> None:
    slot = Slot()
    slot.take(holding(1, "model.w", "optim.w/m"), lambda _: True)
    assert slot.shown() == []
    slot.know(frozenset({"model.w", "optim.w/m", "optim.v/m"}))
    assert [own.step for own in slot.shown()] == [1]


def test_before_the_first_step_there_is_nothing_but_the_model() -> None:
    slot = Slot()
    slot.take(holding(0, "model.w"), lambda _: True)
    assert [own.step for own in slot.shown()] == [0]
