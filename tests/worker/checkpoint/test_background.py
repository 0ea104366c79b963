"""Training goes on while a checkpoint is written, and gets an error if the write failed."""

import threading
from dataclasses import replace
from fractions import Fraction

import pytest
from structlog.testing import capture_logs
from support.models.checkpoint_world import (
    Table,
    binding,
    collected,
    cut,
    differences,
    names_in,
    on_all,
    trained,
    with_aliases,
)
from support.oracles.plain_torch import train

import shoal
from shoal.checkpoint import storage
from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.reading import read
from shoal.state.shards import StateShard, whole_chunk
from shoal.strategies.synchronous.generation_checkpoints import GenerationCheckpoints
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal_proto.errors import CheckpointFailed, InvalidSpec


class Gate:
    """Peers of a single rank, whose `gather` waits for the test."""

    rank = 0

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def gather(self, message: bytes) -> list[bytes]:
        self.reached.set()
        assert self.opened.wait(60)
        return [message]


def at(step, state_shard=None):
    given = state_shard or trained("sgd", 2)
    return StateShard(step=step, shards=given.shards, values=given.values)


def steps_in(directory):
    return [int(name.removeprefix("step-")) for name in names_in(directory)]


def test_the_class_checkpoints_is_public():
    assert shoal.Checkpoints is Checkpoints


def test_a_checkpoint_is_due_at_each_multiple_of_every_steps_but_0(tmp_path):
    checkpoints = Checkpoints(tmp_path, every_steps=5)
    assert [step for step in range(12) if checkpoints.is_due(step)] == [5, 10]


def test_a_directory_stays_where_it_was_when_the_script_named_it(tmp_path, monkeypatch):
    """Regression: a relative one moved with the script's working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    relative, home = (Checkpoints(name, every_steps=1) for name in ("runs", "~/runs"))
    monkeypatch.chdir("elsewhere")
    assert relative.directory == home.directory == tmp_path / "runs"


def unreadable(step):
    """A state with a setting that no reader accepts: its unpickler allows only numbers and text."""
    good = at(step)
    groups = [{**group, "lr": Fraction(1, 10)} for group in good.values["groups"]]
    return replace(good, values={**good.values, "groups": groups})


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_a_checkpoint_that_cannot_be_read_back_replaces_no_other(tmp_path, place):
    root = str(tmp_path) if place == "directory" else f"memory://{tmp_path.name}"
    checkpoints = Checkpoints(root, every_steps=1, keep=1)
    checkpoints.begin_write(at(1))
    checkpoints.begin_write(unreadable(2))
    with pytest.raises(CheckpointFailed, match="was written and cannot be read back") as raised:
        checkpoints.finish_write()
    assert "step-00000002" in str(raised.value)
    assert "Fraction" in str(raised.value)
    assert differences(read(checkpoints.newest(), whole_chunk), with_aliases(at(1))) == []
    checkpoints.begin_write(at(3))
    checkpoints.finish_write()
    assert sorted(storage.complete(checkpoints.directory)) == [3]


def test_the_log_names_the_checkpoint_that_failed(tmp_path):
    """The failure is noticed when the next checkpoint is due."""
    checkpoints = GenerationCheckpoints(ScriptPosition())
    checkpoints.set_store(Checkpoints(tmp_path, every_steps=1))
    with capture_logs() as logs:
        for state_shard in (at(1), unreadable(2), at(3)):
            checkpoints.write(state_shard.step, lambda given=state_shard: given, lambda _: True)
        checkpoints.finish_write()
    (failed,) = [line for line in logs if line["event"] == "checkpoint_failed"]
    assert ".step-00000002." in failed["path"]
    assert "step" not in failed


@pytest.mark.parametrize("setting", ["every_steps", "keep"])
def test_settings_below_one_are_refused(tmp_path, setting):
    with pytest.raises(InvalidSpec, match=f"{setting} is out of range; saw 0"):
        Checkpoints(tmp_path, **{"every_steps": 1, setting: 0})


def test_a_checkpoint_has_the_state_at_the_time_at_which_its_write_began(tmp_path):
    """Training goes on in the same memory before anything is written."""
    model, own = binding("adamw")
    train(model, own.optimizer, range(2))
    offered = collected(model, own, 2)
    gate = Gate()
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    values = {**own.collect(2).values, "tied": offered.values["tied"]}
    checkpoints.begin_write(StateShard(step=2, shards=own.collect(2).shards, values=values), gate)
    train(model, own.optimizer, range(2, 4))
    gate.opened.set()
    checkpoints.finish_write()
    assert differences(read(checkpoints.newest(), whole_chunk), with_aliases(offered)) == []


def test_training_with_checkpoints_ends_where_training_without_does(tmp_path):
    model, own = binding("adamw")
    with Checkpoints(tmp_path, every_steps=2) as checkpoints:
        for step in range(6):
            train(model, own.optimizer, range(step, step + 1))
            if checkpoints.is_due(step + 1):
                checkpoints.begin_write(own.collect(step + 1))
    assert steps_in(tmp_path) == [2, 4, 6]
    assert differences(collected(model, own, 6), trained("adamw", 6)) == []


def test_at_most_one_checkpoint_is_in_progress(tmp_path):
    """A write waits for the one before, so there are never two copies."""
    first, second = Gate(), Gate()
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    checkpoints.begin_write(at(1), first)
    assert first.reached.wait(60)
    offering = threading.Thread(target=checkpoints.begin_write, args=(at(2), second))
    offering.start()
    assert not second.reached.is_set()
    first.opened.set()
    assert second.reached.wait(60)
    assert checkpoints.newest() == tmp_path / "step-00000001", "it was complete before"
    second.opened.set()
    offering.join()
    checkpoints.finish_write()
    assert steps_in(tmp_path) == [1, 2]


def test_the_newest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path, every_steps=10, keep=2) as checkpoints:
        for step in (10, 20, 30, 40):
            checkpoints.begin_write(at(step))
    assert steps_in(tmp_path) == [30, 40]


def test_the_only_complete_checkpoint_stays_when_the_next_fails(tmp_path):
    checkpoints = Checkpoints(tmp_path, every_steps=10, keep=1)
    checkpoints.begin_write(at(10))
    (tmp_path / "step-00000020").mkdir()
    checkpoints.begin_write(at(20))
    with pytest.raises(CheckpointFailed, match="step-00000020 exists already"):
        checkpoints.finish_write()
    assert checkpoints.newest() == tmp_path / "step-00000010"


def test_a_failure_is_raised_by_the_next_offer_and_the_one_after_tries_again(tmp_path):
    in_the_way = tmp_path / "checkpoints"
    in_the_way.touch()
    checkpoints = Checkpoints(in_the_way, every_steps=1)
    checkpoints.begin_write(at(1))
    with pytest.raises(CheckpointFailed, match="step-00000001 could not be begun") as raised:
        checkpoints.begin_write(at(2))
    assert raised.value.details["errno"] == "EEXIST"
    in_the_way.unlink()
    checkpoints.begin_write(at(3))
    checkpoints.finish_write()
    checkpoints.finish_write()
    assert steps_in(in_the_way) == [3]


def test_every_rank_raises_a_failure_at_the_same_step(tmp_path):
    whole = trained("sgd", 2)
    (tmp_path / "step-00000002").touch()

    def act(peers):
        checkpoints = Checkpoints(tmp_path, every_steps=1)
        for _ in range(2):
            checkpoints.begin_write(cut(whole, 0, peers.rank, 2), peers)

    errors = on_all(2, act)
    assert [type(error) for error in errors] == [InvalidSpec] * 2
    assert str(errors[0]) == str(errors[1])
    assert names_in(tmp_path) == ["step-00000002"]


def test_no_rank_returns_before_old_checkpoints_are_deleted(tmp_path, monkeypatch):
    """Regression: the first rank's trainer alone waited for a slow deletion, while the others
    waited for it in a collective, where it counts as hung."""
    whole, order = trained("sgd"), []

    def act(peers):
        gather = peers.gather
        if not peers.rank:
            monkeypatch.setattr(storage, "retire", lambda *_: order.append("deleted"))
            peers.gather = lambda message: (order.append("met"), gather(message))[1]
        with Checkpoints(tmp_path, every_steps=1, keep=1) as checkpoints:
            checkpoints.begin_write(at(1, whole), peers)

    assert on_all(2, act) == [None, None]
    assert order == ["met", "met", "deleted", "met"]


def test_ranks_write_together_again_after_some_have_skipped_a_step(tmp_path):
    """A rank skips a step if its last checkpoint exceeds the limit, which may be over in time for
    other ranks. Regression: every later checkpoint failed, as the ranks' steps were one apart."""
    whole = trained("sgd")

    def act(peers):
        checkpoints = Checkpoints(tmp_path, every_steps=1, keep=9, limit_s=10.0)
        failed = []
        for step in (1, 3, 4, 5) if peers.rank else (1, 2, 3, 4, 5):
            # As a strategy does.
            try:
                checkpoints.finish_write()
            except CheckpointFailed as error:
                failed.append(str(error))
            checkpoints.begin_write(at(step, whole), peers)
        checkpoints.finish_write()
        (failure,) = failed
        assert "step 2 by rank 0; step 3 by rank 1" in failure

    assert on_all(2, act) == [None, None]
    assert steps_in(tmp_path) == [1, 4, 5]


def test_the_log_has_one_line_for_each_checkpoint(tmp_path):
    """Members other than the first log nothing, and the removal of old checkpoints logs nothing."""
    whole = trained("sgd")

    def act(peers):
        with Checkpoints(tmp_path, every_steps=1, keep=1) as checkpoints:
            for step in (1, 2):
                checkpoints.begin_write(at(step, whole), peers)

    with capture_logs() as lines:
        assert on_all(2, act) == [None, None]
    events = [line["event"] for line in lines if line["log_level"] == "info"]
    assert events == ["checkpoint_written"] * 2
    assert steps_in(tmp_path) == [2]


def test_every_rank_knows_the_size_of_what_all_have_written(tmp_path):
    """The status page shows the size beside the step."""
    whole, found = trained("sgd"), []

    def act(peers):
        with Checkpoints(tmp_path, every_steps=1) as checkpoints:
            checkpoints.begin_write(at(3, whole), peers)
        found.append(checkpoints.written)

    assert on_all(2, act) == [None, None]
    files = (tmp_path / "step-00000003").glob("*.distcp")
    num_bytes = sum(each.stat().st_size for each in files)
    assert found == [(3, pytest.approx(num_bytes, rel=0.01))] * 2


def test_a_rank_writes_only_the_entries_that_it_accepts(tmp_path):
    """The rank makes no copy of such entries. Entries that two ranks have are written once all the
    same."""
    whole = trained("sgd")

    def act(peers):
        def writes(name):
            return name == "model.first.bias" or name.startswith("optim.") == bool(peers.rank)

        with Checkpoints(tmp_path, every_steps=1) as checkpoints:
            checkpoints.begin_write(whole, peers, writes)

    assert on_all(2, act) == [None, None]
    newest = Checkpoints(tmp_path, every_steps=1).newest()
    assert differences(read(newest, whole_chunk), with_aliases(whole)) == []
    assert (newest / "__1_0.distcp").is_file()


def test_an_entry_that_no_rank_writes_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    checkpoints.begin_write(at(1), writes=lambda name: name != "model.last.bias")
    with pytest.raises(InvalidSpec, match=r"no rank holds any of model\.last\.bias"):
        checkpoints.finish_write()
    assert names_in(tmp_path) == []


def test_a_rank_lost_while_writing_is_no_error_and_no_checkpoint(tmp_path):
    table = Table(2)
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    checkpoints.begin_write(at(1), table.peers[0])
    table.lose()
    checkpoints.begin_write(at(2))
    checkpoints.finish_write()
    assert steps_in(tmp_path) == [2], "what the first left behind is gone, too"


def test_a_run_that_starts_over_is_refused_beside_later_steps_of_another_run(tmp_path):
    with Checkpoints(tmp_path, every_steps=1) as checkpoints:
        checkpoints.begin_write(at(100))
    again = Checkpoints(tmp_path, every_steps=1)
    again.begin_write(at(1))
    with pytest.raises(
        InvalidSpec, match="run that had taken more steps than this one; saw step 100"
    ):
        again.finish_write()
    again.begin_write(at(101))
    again.finish_write()
    assert steps_in(tmp_path) == [100, 101]


def test_a_first_checkpoint_fails_beside_one_that_cannot_be_examined(
    tmp_path,
):
    """An error of the storage says nothing about the arguments: the job goes on."""
    broken = tmp_path / "step-00000100"
    broken.symlink_to(broken.name)
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    checkpoints.begin_write(at(1))
    with pytest.raises(CheckpointFailed, match="could not be written") as raised:
        checkpoints.finish_write()
    assert raised.value.details["errno"] == "ELOOP"
    broken.unlink()
    checkpoints.begin_write(at(2))
    checkpoints.finish_write()
    assert steps_in(tmp_path) == [2]


def test_a_run_may_go_back_before_its_own_newest_checkpoint(tmp_path):
    """Survivors of a loss may continue from a step before the newest one on disk."""
    with Checkpoints(tmp_path, every_steps=1) as checkpoints:
        for step in (10, 20, 15, 20):
            checkpoints.begin_write(at(step, trained("sgd", 3) if step == 20 else None))
    assert steps_in(tmp_path) == [10, 15, 20]


def test_a_newcomer_may_be_the_first_rank_of_a_run_that_falls_back(tmp_path):
    """The newcomer wrote none of the later checkpoints, but another rank did."""
    veteran = Checkpoints(tmp_path, every_steps=1)
    veteran.begin_write(at(20))
    veteran.finish_write()
    whole = at(15)

    def act(peers):
        checkpoints = veteran if peers.rank else Checkpoints(tmp_path, every_steps=1)
        checkpoints.begin_write(cut(whole, 0, peers.rank, 2), peers)
        checkpoints.finish_write()

    assert on_all(2, act) == [None, None]
    assert steps_in(tmp_path) == [15, 20]


@pytest.mark.parametrize("limit_s", [1e10, float("inf")])
def test_a_limit_beyond_the_longest_wait_of_the_system_is_no_error(tmp_path, limit_s):
    """Regression: OverflowError at the second checkpoint."""
    with Checkpoints(tmp_path, every_steps=1, limit_s=limit_s) as checkpoints:
        checkpoints.begin_write(at(1))
        checkpoints.begin_write(at(2))
    assert steps_in(tmp_path) == [1, 2]


def test_storage_that_does_not_answer_is_waited_for_within_a_limit_and_used_again_after_it(
    tmp_path,
):
    """The next checkpoint begins only when this one ends: at most one is in progress."""
    gate = Gate()
    checkpoints = Checkpoints(tmp_path, every_steps=1, limit_s=0.05)
    checkpoints.begin_write(at(1), gate)
    finish = checkpoints.finish_write
    for call in (finish, lambda: checkpoints.begin_write(at(2)), finish):
        with pytest.raises(CheckpointFailed, match=r"still being written.*shoal-checkpoint-1"):
            call()
    assert checkpoints.is_writing
    gate.opened.set()
    while checkpoints.is_writing:
        gate.reached.wait(0.01)
    checkpoints.finish_write()
    assert steps_in(tmp_path) == [1]
    with pytest.raises(InvalidSpec, match="limit_s is out of range"):
        Checkpoints(tmp_path, every_steps=1, limit_s=0.0)
