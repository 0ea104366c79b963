"""States that a member offers after a loss: none that looks whole and is not."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist

from shoal.backends.in_memory.run import run_in_memory
from shoal.state.host_buffers import StepCopies
from shoal.state.inventory import inventory_of
from shoal.state.peer_checkpoints import PeerCheckpoints
from shoal.state.shards import StateShard, TensorShard
from shoal_proto.errors import InvalidSpec

ME, OTHERS = frozenset({"a"}), frozenset({"b", "c"})


def state_shard(step: int, *names: str, elsewhere: tuple[str, ...] = ()) -> StateShard:
    shards = {name: TensorShard.whole(torch.ones(2)) for name in names}
    return StateShard(step=step, shards=shards, elsewhere=frozenset(elsewhere))


def kept(started: StateShard, live: StateShard) -> PeerCheckpoints:
    """Return the peer checkpoints of one of three members after a generation, without copies."""
    peer_checkpoints = PeerCheckpoints(copies=0, every_steps=1)
    peer_checkpoints.start(started, ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    peer_checkpoints.stop(lambda: live)
    return peer_checkpoints


def test_a_live_state_is_not_offered_if_a_lost_members_part_is_unknown() -> None:
    """The optimizer's state came with the first step; the names of a lost owner's part are
    unknown."""
    peer_checkpoints = kept(state_shard(0, "model.w"), state_shard(1, "model.w", "optim.w/m"))
    assert peer_checkpoints.held(ME | {"b"}) == []


def test_a_live_state_is_offered_if_all_members_are_left() -> None:
    live = state_shard(1, "model.w", "optim.w/m")
    assert [own.step for own in kept(state_shard(0, "model.w"), live).held(ME | OTHERS)] == [1]


def test_a_live_state_lists_what_others_held_at_the_start() -> None:
    started = state_shard(8, "model.w", "optim.w/m", elsewhere=("optim.v/m",))
    (own,) = kept(started, state_shard(9, "model.w", "optim.w/m")).held(ME)
    assert own.elsewhere == {"optim.v/m"}


def test_a_live_state_lists_what_others_have_begun_to_keep() -> None:
    """Regression: the first gradient of a layer came after the last copy, its owner was lost, and
    the others continued with a new state for it."""
    started = state_shard(8, "model.w", "optim.w/m", "optim.w/v", elsewhere=("optim.v/m",))
    peer_checkpoints = PeerCheckpoints(copies=0, every_steps=1)
    peer_checkpoints.start(started, ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    live = state_shard(9, "model.w", "optim.w/m", "optim.w/v")
    peer_checkpoints.stop(lambda: live, stepped_by_others={"v", "late"})
    (own,) = peer_checkpoints.held(ME)
    assert own.elsewhere == {"optim.v/m", "optim.late/m", "optim.late/v"}
    (own,) = peer_checkpoints.held(ME | OTHERS)
    assert own.elsewhere == {"optim.v/m"}, "each member lists its own"


def test_an_optimizer_without_state_adds_no_names() -> None:
    peer_checkpoints = PeerCheckpoints(copies=0, every_steps=1)
    peer_checkpoints.start(state_shard(8, "model.w"), ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    peer_checkpoints.stop(lambda: state_shard(9, "model.w"), stepped_by_others={"late"})
    assert [own.elsewhere for own in peer_checkpoints.held(ME)] == [frozenset()]


def test_state_that_an_interrupted_update_has_changed_is_listed_as_missing() -> None:
    """A member whose update was interrupted is still there, but the state that it held after the
    step is not."""
    peer_checkpoints = PeerCheckpoints(copies=0, every_steps=1)
    peer_checkpoints.start(state_shard(0, "model.w"), ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    peer_checkpoints.drop_live_state(1, frozenset({"optim.w/m"}))
    assert peer_checkpoints.held(ME | OTHERS) == [state_shard(1, elsewhere=("optim.w/m",))]
    peer_checkpoints.start(state_shard(1, "model.w"), ME | OTHERS, lambda: None, lambda _: True)  # type: ignore[arg-type, return-value]
    assert peer_checkpoints.held(ME | OTHERS) == []


def test_nothing_is_held_after_close() -> None:
    """Holds for the names of a destroyed state, too."""
    peer_checkpoints = kept(state_shard(8, "model.w"), state_shard(9, "model.w"))
    peer_checkpoints.drop_live_state(9, frozenset({"optim.w/m"}))
    peer_checkpoints.close()
    assert peer_checkpoints.held(ME | OTHERS) == []


def test_state_of_a_lone_member_outlives_a_joiner_that_is_lost_at_once() -> None:
    """Regression: the joiner took its part of the state with it. Copies make that part
    superfluous."""

    def body() -> tuple[list[int], bool]:
        peer_checkpoints = PeerCheckpoints(copies=1, every_steps=1)
        if dist.get_rank() == 0:
            peer_checkpoints.start(state_shard(3, "model.w"), ME, dist.new_group, lambda _: True)
            peer_checkpoints.stop(lambda: state_shard(5, "model.w"))
        peer_checkpoints.start(
            state_shard(5, "model.w"), ME | {"b"}, dist.new_group, lambda _: True
        )
        before = [each.step for each in peer_checkpoints.held(ME)]
        for step in (6, 7):
            peer_checkpoints.offer(state_shard(step, "model.w"))
        still = any(each.step == 5 for each in peer_checkpoints.held(ME))
        peer_checkpoints.close()
        return before, still

    assert run_in_memory(body, 2) == [([5], False), ([], False)]


def held_after_a_drain(leaving: tuple[int, ...]) -> set[str]:
    """Return the names that this member holds after all four have handed over; each had one tensor
    alone."""
    names = [f"model.{each}" for each in range(4)]
    own = names[dist.get_rank()]
    others = tuple(name for name in names if name != own)
    peer_checkpoints = PeerCheckpoints(copies=1, every_steps=100)
    shard = state_shard(5, own, elsewhere=others)
    peer_checkpoints.start(shard, frozenset(names), dist.new_group, lambda _: True)
    peer_checkpoints.hand_over(shard, leaving=leaving)
    peer_checkpoints.stop(lambda: shard)
    held = peer_checkpoints.held(frozenset(names))
    dist.barrier()
    peer_checkpoints.close()
    return {name for each in held if each.step == 5 for name in each.shards}


def test_a_leaving_member_and_a_loss_right_after_it_lose_no_state() -> None:
    """Regression: a leaving member took along its copies of another member's tensors. Until the
    others had made new copies, the loss of that member lost the state of the job."""
    for leaver in range(4):
        ranks = run_in_memory(held_after_a_drain, 4, (leaver,))
        for lost in set(range(4)) - {leaver}:
            left = (held for rank, held in enumerate(ranks) if rank not in (leaver, lost))
            assert set().union(*left) == {f"model.{rank}" for rank in range(4)}
    usual = run_in_memory(held_after_a_drain, 4, ())
    assert [len(held) for held in usual] == [2] * 4, (
        "without a leaving member there are no further copies"
    )


@pytest.mark.parametrize("leaving", list(itertools.combinations(range(4), 3)))
def test_members_that_leave_at_once_hand_over_all_they_have(leaving: tuple[int, ...]) -> None:
    """Regression: leaving members gave their copies to each other, and the state of the job was
    lost with them."""
    (stays,) = set(range(4)) - set(leaving)
    ranks = run_in_memory(held_after_a_drain, 4, leaving)
    assert ranks[stays] == {f"model.{rank}" for rank in range(4)}
    assert [len(ranks[rank]) for rank in leaving] == [1] * 3, "leaving members get no copies"


def test_closing_waits_for_the_copy_in_progress() -> None:
    """Regression: the copying thread freed a tensor as the interpreter ended, and the process
    aborted."""
    closing = threading.Event()

    def body() -> bool:
        peer_checkpoints = PeerCheckpoints(copies=1, every_steps=1)
        peer_checkpoints.start(
            state_shard(3, "model.w"), ME | {"b"}, dist.new_group, lambda _: True
        )
        copies = peer_checkpoints._copies
        assert copies is not None
        if dist.get_rank() == 0:
            closing.set()
        else:
            closing.wait(60)
        peer_checkpoints.offer(state_shard(3, "model.w"))
        assert copies._thread is not None
        peer_checkpoints.close()
        return copies._thread.is_alive()

    assert run_in_memory(body, 2) == [False, False]


def test_a_snapshot_of_the_model_before_the_first_step_is_shown_at_once() -> None:
    slot = StepCopies()
    start = state_shard(0, "model.w")
    slot.begin_own_copy(start, inventory_of([start]), lambda _: True)
    assert [own.step for own in slot.complete_copies()] == [0]


def test_a_generation_begins_without_the_connections_for_copies() -> None:
    """Connections are made once, with the first copy, so that no member waits for them if another
    one stops."""

    def body() -> list[int]:
        made: list[dist.ProcessGroup] = []

        def new_group() -> dist.ProcessGroup:
            made.append(dist.new_group())
            return made[-1]

        peer_checkpoints = PeerCheckpoints(copies=1, every_steps=1)
        peer_checkpoints.start(state_shard(3, "model.w"), ME | {"b"}, new_group, lambda _: True)
        counts = [len(made)]
        for _ in range(2):
            peer_checkpoints.offer(state_shard(3, "model.w"))
            counts.append(len(made))
        peer_checkpoints.close()
        return counts

    assert run_in_memory(body, 2) == [[0, 1, 1]] * 2


@pytest.mark.parametrize(("copies", "every_steps"), [(-1, 1), (1, 0)])
def test_settings_out_of_range_are_refused(copies: int, every_steps: int) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        PeerCheckpoints(copies=copies, every_steps=every_steps)
    assert refusal.value.seen == f"copies={copies} copy_every_steps={every_steps}"
