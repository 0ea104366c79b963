"""A member that could not restore a state claims no step of it, and trains on none of its parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import enter, generation_of, take_step, use_group, weights_of
from support.training import equality
from torch import Tensor

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.checkpoint.background import Checkpoints
from shoal.state.replicated import ReplicatedState
from shoal.state.shards import StateShard, TensorShard
from shoal.strategies.local_sgd.outer_loop import OuterLoop
from shoal.strategies.outer_step import OuterStep


def scaled(state: StateShard) -> StateShard:
    """Return another member's state, of a later step."""
    shards = {k: TensorShard.whole(2 * shard.tensor) for k, shard in state.shards.items()}
    return replace(state, step=9, shards=shards)


def fail_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next restore fail once it has written the weights."""
    put = ReplicatedState._put_slots

    def fail(*_: Any) -> None:
        monkeypatch.setattr(ReplicatedState, "_put_slots", put)
        raise MemoryError

    monkeypatch.setattr(ReplicatedState, "_put_slots", fail)


def recovered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Return a member's weights at its checkpoint of step 1, and in the generation after a failed
    restore."""
    run, strategy = equality.run_of("sgd"), equality.made("ddp", 1)()
    assert isinstance(strategy, shoal.DDP)
    checkpoints = Checkpoints(directory, every_steps=1)
    strategy.keep_checkpoints(checkpoints)
    rank = enter(run, strategy)
    take_step(strategy, run.loader().synchronous(0, *rank.share), run.loss)
    checkpoints.finish_write()
    found = [weights_of(strategy)]
    fail_in_the_middle(monkeypatch)
    with pytest.raises(MemoryError):
        strategy.restore(scaled(ReplicatedState(rank.model, rank.optimizer).capture(1)))
    strategy.abandon()
    assert (strategy.step, strategy.has_state) == (0, False)
    use_group(strategy)
    strategy.enter(generation_of(["m0"], "m0", 2))
    assert (strategy.step, strategy.has_state) == (1, True)
    found.append(weights_of(strategy))
    strategy.close()
    return found


def test_the_member_starts_from_a_checkpoint_if_no_other_member_has_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a member of ddp kept the step that it had before, and so read no checkpoint."""
    ((before, after),) = run_in_memory(recovered, 1, tmp_path, monkeypatch)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_member_of_local_sgd_keeps_the_state_of_its_last_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = equality.build("sgd", 0)
    loop = OuterLoop(model, optimizer, OuterStep(), None)
    loop.agree(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fail_in_the_middle(monkeypatch)
    with pytest.raises(MemoryError):
        loop.take(scaled(loop.outgoing()))
    assert loop.agreed.step == 4
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
