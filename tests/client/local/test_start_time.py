"""The time limit for a part's start, and the files of a cluster that did not start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal_client.local import directory as directories
from shoal_client.local.directory import (
    given_directory,
    keep_logs_at_end,
    remove_left_over,
    temporary_directory,
)
from shoal_client.local.start_time import MOST_S, StartTime, cpu_s
from shoal_proto.errors import InvalidSpec, Unavailable

LATER_S = 3600.0


def test_a_start_that_makes_progress_has_more_time_up_to_a_bound() -> None:
    """A part that gets a fifteenth of a core, as at load 30, is not given up before the bound."""
    start = StartTime(60.0, 0.0)
    for now_s in range(0, int(MOST_S) + 1, 5):
        assert start.why_over(now_s, now_s / 15) == "", now_s
    assert start.why_over(MOST_S + 5, MOST_S / 15).startswith("not up in 605 s, with 40.0 s of CPU")


def test_a_start_without_progress_is_given_up() -> None:
    """A part that only waits uses a little CPU time, too."""
    start = StartTime(60.0, 0.0)
    assert start.why_over(61.0, 2.0) == ""
    assert start.why_over(121.0, 2.1) == ""
    reason = start.why_over(122.0, 2.1)
    assert reason == "not up in 122 s, and no progress in the last 61: it used 0.1 s of CPU"


def test_the_cpu_time_of_a_process_is_measured() -> None:
    assert cpu_s(os.getpid()) > 0
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    assert cpu_s(process.pid) == 0


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(directories.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_of_a_killed_command_are_removed_by_the_next(parent: Path) -> None:
    """The directory of a running command stays."""
    killed = [_left_by_a_kill(f"shoal-{command}-") for command in ("up", "host", "demo")]
    with temporary_directory("shoal-up-") as running, temporary_directory("shoal-run-"):
        assert not any(each.exists() for each in killed)
        assert running.exists()
    assert not running.exists()


def test_files_of_another_machine_stay(parent: Path) -> None:
    """Locks of another machine are not seen on a shared file system."""
    directory = _left_by_a_kill("shoal-run-")
    (mark,) = directory.glob(f"{directories.TEMPORARY}-*")
    theirs = mark.rename(directory / f"{directories.TEMPORARY}-another-boot")
    remove_left_over(parent, time.time() + directories.KEPT_S)
    assert (directory / "certs" / "ca.key").exists()
    theirs.rename(mark)
    remove_left_over(parent, time.time())
    assert not directory.exists()


def test_logs_that_a_killed_command_meant_to_keep_are_kept(parent: Path) -> None:
    """A cluster that gives up names its log, and may be killed before all its parts have ended."""
    directory = _left_by_a_kill("shoal-up-")
    (directory / directories.KEPT_LOGS).touch()
    (directory / "ps-0.log").write_text("why it failed")
    remove_left_over(parent, time.time())
    assert {path.name for path in directory.iterdir()} == {"ps-0.log", directories.KEPT_LOGS}
    remove_left_over(parent, time.time() + directories.KEPT_S + LATER_S)
    assert not directory.exists()


def test_a_directory_that_the_user_has_named_is_never_removed(parent: Path) -> None:
    """Such a directory may have the name of a temporary one, or have been one."""
    named, taken_over = parent / "shoal-up-data", _left_by_a_kill("shoal-up-")
    (named / "certs").mkdir(parents=True)
    for each in (named, taken_over):
        with given_directory(each) as directory:
            assert directory == each
    for each in (named, taken_over):
        os.utime(each, (1, 1))
    with temporary_directory("shoal-run-"):
        assert (named / "certs").exists()
        assert (taken_over / "certs" / "ca.key").exists()


def test_a_directory_is_refused_while_another_cluster_uses_it(parent: Path) -> None:
    """Nothing in it is changed: the other cluster has its certificates there."""
    with given_directory(parent / "data") as directory:
        (directory / directories.KEPT_LOGS).touch()
        with (
            pytest.raises(InvalidSpec, match="another `shoal up` uses the directory"),
            given_directory(directory),
        ):
            pass
        link = parent / "link"
        link.symlink_to(directory)
        with (
            pytest.raises(InvalidSpec, match="another `shoal up` uses the directory"),
            given_directory(link),
        ):
            pass
        assert (directory / directories.KEPT_LOGS).exists()
    with given_directory(directory):
        pass


def _left_by_a_kill(prefix: str) -> Path:
    """Run a command that is killed while it uses its temporary directory."""
    command = f"""
import os, pathlib, signal
from shoal_client.local.directory import temporary_directory
with temporary_directory({prefix!r}) as made:
    print(made, flush=True)
    (made / "certs").mkdir()
    (made / "certs" / "ca.key").write_text("secret")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": str(directories.tempfile.gettempdir())}
    ended = subprocess.run(
        [sys.executable, "-c", command],
        check=False,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL
    return Path(ended.stdout.strip())


def test_only_the_logs_of_a_failed_start_are_kept_for_a_day(parent: Path) -> None:
    with (
        pytest.raises(Unavailable, match="did not come up"),
        temporary_directory("shoal-up-") as made,
    ):
        for name in ("coordinator.log", "etcd/etcd.log", "etcd/data/wal", "certs/ca.key"):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_text(name)
        raise Unavailable("the coordinator did not come up")
    kept = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    assert kept == ["coordinator.log", "etcd/etcd.log", directories.KEPT_LOGS]
    begun_s = made.stat().st_mtime
    remove_left_over(parent, begun_s + LATER_S)
    assert made.exists()
    remove_left_over(parent, begun_s + directories.KEPT_S + LATER_S)
    assert not made.exists()


def test_the_logs_of_a_cluster_that_is_given_up_are_kept(parent: Path) -> None:
    """The cluster still writes logs when it asks for that."""
    with temporary_directory("shoal-up-") as made:
        keep_logs_at_end(made)
        (made / "etcd.log").write_text("no log at all")
        (made / "wal").write_text("data")
    assert {path.name for path in made.iterdir()} == {"etcd.log", directories.KEPT_LOGS}
    named = parent / "data"
    named.mkdir()
    keep_logs_at_end(named)
    assert list(named.iterdir()) == []


def test_a_cluster_that_ends_well_leaves_no_file(parent: Path) -> None:
    with temporary_directory("shoal-run-") as made:
        (made / "coordinator.log").write_text("all is well")
    assert list(parent.iterdir()) == []
