"""A writer killed at any instant leaves a whole checkpoint or none."""

import signal

import pytest
from support.models import checkpoint_world as world
from support.models.checkpoint_world import (
    cut,
    differences,
    names_in,
    needs_cut,
    trained,
    with_aliases,
)
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.backends.in_memory.run import run_in_memory
from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.reading import read
from shoal.checkpoint.storage import newest
from shoal.state.shards import whole_chunk


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("old", "new"), [(10, 20), (10, 10)], ids=["next to another", "in the place of another"]
)
def test_a_writer_killed_before_any_call_leaves_a_whole_checkpoint(tmp_path, old, new):
    with Ranks() as ranks:
        rank = ranks.start(world.die_at_each_call, str(tmp_path), 1, old, new)
        deaths = []
        while not deaths or deaths[-1]["status"]:
            deaths.append(rank.expect("died"))
    found = [death["whole"] for death in deaths]
    assert {death["status"] for death in deaths[:-1]} == {-signal.SIGKILL}
    assert len(deaths) > 10, "calls that touch the directory"
    turn = found.index(["new"])
    assert 5 < turn < len(found)
    assert found == [["old"]] * turn + [["new"]] * (len(found) - turn)
    # The next writer has removed what the dead one left.
    assert [death["left"] for death in deaths] == [[f"step-{new:08d}"]] * len(deaths)


def test_a_rank_killed_while_writing_leaves_no_checkpoint(tmp_path):
    """The other ranks go on without an error: handling the loss is up to membership."""
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory, every_steps=1) as checkpoints:
        checkpoints.begin_write(trained("sgd", 1))
    with Ranks() as ranks:
        members = [
            ranks.start(world.write_with_a_loss, str(tmp_path / "store"), str(directory), rank, 3)
            for rank in range(3)
        ]
        for member in members[:2]:
            member.expect("closed")
        assert members[2].join() == -signal.SIGKILL
    assert newest(directory) == directory / "step-00000001"
    with Checkpoints(directory, every_steps=1) as checkpoints:
        checkpoints.begin_write(trained("sgd", 4))
    assert names_in(directory) == ["step-00000001", "step-00000004"]


def on_gloo(directory):
    return run_on_gloo(3, world.write_in_group, directory, 3)


def in_memory(directory):
    return run_in_memory(world.write_in_group, 3, directory, 3)


@pytest.mark.sampled()
@pytest.mark.parametrize("run", [on_gloo, in_memory])
def test_ranks_of_one_group_write_together(tmp_path, run):
    complete = run(str(tmp_path))
    assert complete == ["step-00000003"] * 3
    whole = trained("adamw", 3)
    for rank in range(2):
        found = read(tmp_path / "step-00000003", needs_cut(1, rank, 2))
        assert differences(found, cut(with_aliases(whole), 1, rank, 2)) == []


def test_a_disk_that_is_full_fails_the_checkpoint_and_not_the_training(tmp_path):
    with Ranks() as ranks:
        rank = ranks.start(world.write_where_files_cannot_grow, str(tmp_path))
        failed = rank.expect("failed")
        done = rank.expect("done")
    assert failed["step"] == 3
    assert failed["details"] == {
        "path": str(tmp_path / "step-00000003"),
        "rank": "0",
        "errno": "EFBIG",
    }
    assert "[Errno 27] File too large" in failed["text"]
    assert done["left"] == ["step-00000001", "step-00000002", "step-00000004"]
    found = read(done["newest"], whole_chunk)
    assert differences(found, with_aliases(trained("adamw", 4))) == []
