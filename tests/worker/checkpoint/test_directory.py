"""A checkpoint's directory is complete, or it does not exist."""

import errno
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.models.checkpoint_world import names_in

from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.directory import begin, complete, publish, sweep
from shoal.checkpoint.storage import newest, path_of_step, retire
from shoal.strategies.synchronous.generation_checkpoints import GenerationCheckpoints
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal_proto.errors import InvalidSpec, Unavailable


def made(directory, step, content="x"):
    path = path_of_step(directory, step)
    partial = begin(path)
    (partial / ".metadata").write_text(content)
    publish(partial, path)
    return path


def test_newest_is_the_highest_complete_step(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None
    made(tmp_path, 9)
    made(tmp_path, 120)
    (tmp_path / "step-00000300").mkdir()  # copied in part
    (begin(path_of_step(tmp_path, 200)) / ".metadata").touch()
    (tmp_path / "notes").touch()
    assert newest(tmp_path) == tmp_path / "step-00000120"


def test_steps_beyond_eight_digits_are_still_in_order(tmp_path):
    made(tmp_path, 99_999_999)
    last = made(tmp_path, 100_000_000)
    assert newest(tmp_path) == last
    retire(tmp_path, 100_000_000, keep=1)
    assert list(complete(tmp_path)) == [100_000_000]


def test_the_same_step_again_replaces_the_one_before(tmp_path):
    made(tmp_path, 5, "old")
    path = made(tmp_path, 5, "new")
    assert (path / ".metadata").read_text() == "new"
    assert names_in(tmp_path) == ["step-00000005"]


def test_a_checkpoint_that_is_being_replaced_counts_until_the_new_one_is_complete(tmp_path):
    path = made(tmp_path, 5, "old")
    aside = tmp_path / ".step-00000005.0123456789abcdef.replaced"
    path.rename(aside)
    assert newest(tmp_path) == aside
    sweep(path_of_step(tmp_path, 6), keep=tmp_path)
    assert newest(tmp_path) == path, "its writer died; it is put back"
    assert (path / ".metadata").read_text() == "old"


def test_leftovers_of_dead_writers_are_removed_and_nothing_else(tmp_path):
    kept = made(tmp_path, 5)
    begin(path_of_step(tmp_path, 6))
    other = begin(tmp_path / "mine")
    own = begin(path_of_step(tmp_path, 7))
    (tmp_path / ".step-00000007.partial").mkdir()
    sweep(path_of_step(tmp_path, 7), keep=own)
    assert set(tmp_path.iterdir()) == {kept, other, own, tmp_path / ".step-00000007.partial"}


@pytest.mark.parametrize(
    ("steps", "step", "left"),
    [([10, 20, 30, 40], 40, [30, 40]), ([10], 10, [10]), ([10, 20, 30, 90], 30, [20, 30, 90])],
)
def test_checkpoints_before_the_newest_ones_up_to_a_step_are_removed(tmp_path, steps, step, left):
    for each in steps:
        made(tmp_path, each)
    retire(tmp_path, step, keep=2)
    assert sorted(complete(tmp_path)) == left
    assert len(names_in(tmp_path)) == len(left)


def test_a_checkpoint_that_cannot_be_deleted_keeps_no_other_from_being_deleted(
    tmp_path, monkeypatch
):
    for step in (10, 20, 30, 40):
        made(tmp_path, step)
    rename = Path.rename

    def refusing(path, target):
        if path.name == "step-00000010":
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with capture_logs() as logs:
        retire(tmp_path, 40, keep=2)
    assert sorted(complete(tmp_path)) == [10, 30, 40]
    assert [(line["event"], line["path"]) for line in logs if line["log_level"] == "warning"] == [
        ("leftover_not_removed", str(tmp_path / "step-00000010"))
    ]


def test_a_checkpoint_that_cannot_be_examined_keeps_no_other_from_being_deleted(tmp_path):
    for step in (10, 20, 30, 40):
        made(tmp_path, step)
    unreadable = tmp_path / "step-00000005"
    unreadable.symlink_to(unreadable.name)
    with capture_logs() as logs:
        retire(tmp_path, 40, keep=2)
    assert names_in(tmp_path) == ["step-00000005", "step-00000030", "step-00000040"]
    assert [(line["event"], line["path"]) for line in logs if line["log_level"] == "warning"] == [
        ("checkpoint_not_examined", str(unreadable))
    ]


def test_a_checkpoint_that_cannot_be_examined_is_not_skipped(tmp_path):
    """A run that did not see the checkpoint would continue from an older one."""
    made(tmp_path, 10)
    (tmp_path / "step-00000020").symlink_to("step-00000020")
    with pytest.raises(InvalidSpec, match="step-00000020 cannot be examined; saw Too many levels"):
        newest(tmp_path)


@pytest.mark.parametrize("name", ["stat", "iterdir"])
def test_an_error_that_may_pass_is_no_refusal(tmp_path, monkeypatch, name):
    """Regression: one EIO ended the worker with InvalidSpec, after which it is not restarted."""
    made(tmp_path, 10)

    def failing(own, **_):
        raise OSError(errno.EIO, "Input/output error", str(own))

    checkpoints = GenerationCheckpoints(ScriptPosition())
    checkpoints.set_store(Checkpoints(tmp_path, every_steps=1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, name, failing)
        with pytest.raises(OSError, match="Input/output error"):
            newest(tmp_path)
        with pytest.raises(Unavailable, match="Input/output error"):
            checkpoints.steps()
    assert checkpoints.steps() == [10]


def test_a_writer_that_still_lives_publishes_nothing_that_another_removes(tmp_path, monkeypatch):
    """Regression: it renamed the directory while its files were being deleted, so that an empty
    directory had the name of a checkpoint."""
    path = path_of_step(tmp_path, 5)
    partial = begin(path)
    (partial / ".metadata").touch()
    remove, refused = shutil.rmtree, []

    def removing(folder, **options):
        with pytest.raises(FileNotFoundError) as raised:
            publish(partial, path)
        refused.append(raised.value)
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", removing)
    sweep(path_of_step(tmp_path, 6), keep=tmp_path)
    assert len(refused) == 1
    assert names_in(tmp_path) == []


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    with pytest.raises(InvalidSpec, match="thesis exists already and is not a checkpoint"):
        begin(tmp_path / "thesis")
    assert names_in(tmp_path) == ["thesis"]
