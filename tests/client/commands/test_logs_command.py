"""`shoal logs`: what workers printed, as their launcher keeps it."""

import os
from pathlib import Path

import pytest

from shoal_client.cli import main
from shoal_client.commands import logs
from shoal_client.local import worker_logs
from shoal_client.local.worker_logs import WorkerLog, log_path

NOWHERE = "http://127.0.0.1:1"


def test_the_newest_lines_are_shown_over_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in (0, 5):
        kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
        for number in range(start, start + 5):
            kept.write(f"line {number}")
        kept.close()
    assert main(["logs", "w0", "--job", "digits", "-n", "3", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["line 7", "line 8", "line 9"]


def test_a_worker_that_prints_for_ever_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files, and the newest lines are in them."""
    monkeypatch.setattr(worker_logs, "MAX_BYTES", 4096)
    kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
    for number in range(2000):
        kept.write(f"line {number}")
    files = sorted(tmp_path.rglob("*.log*"))
    assert [path.name for path in files] == ["w0.log", "w0.log.1"]
    assert sum(path.stat().st_size for path in files) <= 2 * 4096
    assert files[0].read_text().endswith("line 1999\n")
    assert (files[0].stat().st_mode & 0o777, kept.problem) == (0o600, "")


def test_nothing_is_written_to_a_file_that_another_laid_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's name can be guessed, so another user may be there first: a file of theirs, a
    link, one more name of a file. Their own is told by its owner, here as if this user were
    another."""
    path = log_path(tmp_path / "guessed", "digits", "w0")
    path.parent.mkdir(parents=True)
    target = tmp_path / "target"
    target.write_text("as it was\n")
    for lay in (path.symlink_to, path.hardlink_to):
        lay(target)
        kept = WorkerLog(path)
        kept.write("a secret")
        assert kept.problem and target.read_text() == "as it was\n"
        path.unlink()
    path.write_text("")
    monkeypatch.setattr(worker_logs.os, "geteuid", lambda: os.getuid() + 1)
    kept = WorkerLog(path)
    kept.write("a secret")
    assert "another user's" in kept.problem and path.read_text() == ""


def test_all_directories_of_logs_are_private(tmp_path: Path) -> None:
    path = log_path(tmp_path / "root", "digits", "w0")
    kept = WorkerLog(path)
    kept.write("a line")
    kept.close()
    modes = {each.stat().st_mode & 0o777 for each in (path.parent, path.parent.parent)}
    assert (modes, kept.problem) == ({0o700}, "")


def test_what_is_printed_is_followed_into_the_next_file(tmp_path: Path) -> None:
    path = log_path(tmp_path, "digits", "w0")
    kept = WorkerLog(path)
    kept.write("before")
    printed = iter(("after", "", "and in the next file"))

    def print_more(seconds: float) -> None:
        line = next(printed)
        if not line:
            kept.write("the last of this file")
            path.replace(worker_logs.older(path))
            kept.close()
        else:
            kept.write(line)

    found = logs._followed(path, print_more)
    assert next(found) == "after\n"
    assert next(found) == "the last of this file\n"
    assert next(found) == "and in the next file\n"


def test_a_member_of_another_host_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["logs", "w9", "--job", "digits", "--log-dir", str(tmp_path), "--http", NOWHERE]
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "nothing of member w9 of job digits is kept on this host" in told


def test_a_disk_that_takes_nothing_costs_the_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("a file, where a directory should be")
    kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
    kept.write("a line")
    assert "digits" in kept.problem
