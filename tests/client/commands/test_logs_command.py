"""`shoal logs`: the output of workers, from their launchers or from files of this host."""

import errno
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clusters.status_world import World, member

from shoal_client.cli import INTERRUPTED, main, parse
from shoal_client.commands import logs
from shoal_client.local import worker_logs
from shoal_client.local.worker_logs import KEPT_S, WorkerLog, log_path, older, remove_old
from shoal_proto.errors import InvalidSpec, UnknownJob

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.long
def test_the_newest_lines_of_a_member_come_from_its_launcher(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal logs` prints as many of the newest lines as requested, even if they are more than one
    answer holds. The job is named before the member or by `--job`."""
    world.printed["w1"] = [f"line {number}" for number in range(500)]
    for arguments in (["digits", "w1"], ["w1", "--job", "digits"]):
        assert main(["logs", *arguments, "-n", "120", "--http", url]) == 0
        assert capsys.readouterr().out.splitlines() == world.printed["w1"][-120:]
    assert main(["logs", "digits", "w1", "--http", url]) == 0
    assert capsys.readouterr().out.splitlines() == world.printed["w1"][-100:]


@pytest.mark.long
def test_the_lines_of_all_members_of_a_job_are_shown(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.printed["w0"] = ["zero"]
    world.printed["w2"] = [f"line {number}" for number in range(30)]
    assert main(["logs", "digits", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == ["[w0] zero", *(f"[w2] line {n}" for n in range(20, 30))]
    assert errors == "shoal logs: no launcher passes on the output of w1\n"


def test_a_launcher_that_does_not_answer_hides_no_other_members_lines(
    world: World,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The silent launcher's lines follow once it answers. The command fails if none answers."""
    monkeypatch.setenv("SHOAL_LOG_DIR", str(tmp_path))
    world.printed |= {name: [f"line of {name}"] for name in ("w0", "w1", "w2")}
    world.silent = {"w1"}

    def meanwhile(seconds: float) -> None:
        world.launchers_live = bool(world.silent)
        world.silent.clear()

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    assert main(["logs", "digits", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == [f"[{name}] line of {name}" for name in ("w0", "w2", "w1")]
    assert "the launcher of w1 did not answer" in errors
    world.silent = {"w0", "w1", "w2"}
    assert main(["logs", "digits", "--http", url]) == 1
    assert "the launcher of w2 did not answer" in capsys.readouterr().err


@pytest.mark.long
def test_lines_are_followed_until_the_launcher_ends(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.printed["w1"] = ["first"]
    rounds = iter(("second", "third", ""))

    def meanwhile(seconds: float) -> None:
        if line := next(rounds):
            world.printed["w1"].append(line)
        else:
            world.launchers_live = False

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    assert main(["logs", "digits", "w1", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == ["first", "second", "third"]
    assert errors == "shoal logs: the launcher of w1 has ended\n"


@pytest.mark.long
def test_members_that_join_later_are_followed_as_well(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of a job is also that of a worker that replaces another, under another name."""
    world.change("digits", members=[member("w0", 0)])
    world.printed["w0"] = ["zero"]
    rounds = count(1)

    def meanwhile(seconds: float) -> None:
        match next(rounds):
            case 1:
                world.change("digits", members=[member("new", 0)])
                world.printed = {"new": ["one"]}
            case 3:
                world.change("digits", members=[])
                world.printed = {}

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    assert main(["logs", "digits", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == ["zero", "[new] one"]
    assert "new has joined" in errors


@pytest.mark.long
def test_a_member_that_comes_back_under_its_id_is_followed_again(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container that is started again keeps its name. The member is not followed again while its
    ended process is still listed."""
    first, again = member("w0", 0), member("w0", 0, public_id="another")
    world.change("digits", members=[first, member("w1", 1)])
    world.printed = {"w0": ["zero"], "w1": ["one"]}
    rounds = count(1)

    def meanwhile(seconds: float) -> None:
        match next(rounds):
            case 1:
                del world.printed["w0"]
            case 2:
                world.change("digits", members=[member("w1", 1)])
            case 3:
                world.change("digits", members=[again, member("w1", 1)])
                world.printed["w0"] = ["zero again"]
            case 5:
                world.change("digits", members=[])
                world.printed = {}

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    monkeypatch.setattr(logs, "JOINED_EACH_S", 0.0)
    assert main(["logs", "digits", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown.splitlines() == ["[w0] zero", "[w1] one", "[w0] zero again"]
    assert errors.count("w0 has joined") == 1


@pytest.mark.long
def test_members_whose_launchers_are_not_connected_yet_are_followed(
    world: World, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launchers connect to a new leader a moment after their members: nobody has ended."""
    world.change("digits", members=[member("w0", 0), member("w1", 1)])
    world.printed = {"w0": ["zero"]}
    rounds = count(1)

    def meanwhile(seconds: float) -> None:
        match next(rounds):
            case 2:
                world.printed = {}
            case 4:
                world.printed = {"w0": ["zero", "zero again"], "w1": ["one"]}
            case 7:
                world.change("digits", members=[])
                world.printed = {}

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    monkeypatch.setattr(logs, "JOINED_EACH_S", 0.0)
    assert main(["logs", "digits", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert sorted(shown.splitlines()) == ["[w0] zero", "[w0] zero again", "[w1] one"]
    assert errors.count("has ended") == 2


@pytest.mark.long
def test_last_lines_of_an_ended_launcher_are_marked_as_such(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.printed["w1"], world.launchers_live = ["the loss is nan"], False
    assert main(["logs", "digits", "w1", "-f", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert shown == "the loss is nan\n" and "has ended; it left these lines" in errors


@pytest.mark.long
def test_without_output_from_a_launcher_files_of_this_host_are_shown(
    world: World,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command names each file with its age: it may be of an earlier run of the job."""
    monkeypatch.setenv("SHOAL_LOG_DIR", str(tmp_path))
    arguments = ["logs", "digits", "w9", "--http", url]
    assert main(arguments) == 1
    assert "no launcher passes on the output of w9" in capsys.readouterr().err
    kept = WorkerLog(log_path(tmp_path, "digits", "w9"))
    kept.write("\x1b[2Jof a file")
    kept.close()
    written_s = time.time() - 7200
    os.utime(kept.path, (written_s, written_s))
    assert main(arguments) == 0
    shown, errors = capsys.readouterr()
    assert shown == "of a file\n"
    assert "no launcher passes on the output of w9; these are files of this host" in errors
    assert f"{kept.path}, written 2 h ago" in errors


def test_a_host_without_temporary_files_gets_the_coordinators_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a read-only root may have no folder for temporary files."""

    def fail() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.delenv("SHOAL_LOG_DIR", raising=False)
    command = parse(["logs", "digitz", "--http", url])
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(UnknownJob, match="no member is named digitz"):
        command()


@pytest.mark.long
def test_files_of_this_host_are_shown_if_only_a_member_is_named(
    world: World,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator knows the member's job, and no launcher passes on its output."""
    monkeypatch.setenv("SHOAL_LOG_DIR", str(tmp_path))
    kept = WorkerLog(log_path(tmp_path, "digits", "w1"))
    kept.write("of a file")
    kept.close()
    assert main(["logs", "w1", "--http", url]) == 0
    assert capsys.readouterr().out == "of a file\n"
    # The same for all members, if the coordinator has the output of none.
    assert main(["logs", "digits", "--http", url]) == 0
    assert capsys.readouterr().out.endswith("of a file\n")


def test_naming_two_jobs_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="two jobs are named"):
        logs.LogsConfig(name="digits", member="w1", of_job="other")


def test_the_newest_lines_of_a_file_span_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in (0, 5):
        kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
        for number in range(start, start + 5):
            kept.write(f"line {number}")
        kept.close()
    assert main(["logs", "w0", "--job", "digits", "-n", "3", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["line 7", "line 8", "line 9"]


def test_the_files_of_a_workers_output_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files have the newest lines."""
    monkeypatch.setattr(worker_logs, "MAX_BYTES", 4096)
    kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
    for number in range(2000):
        kept.write(f"line {number}")
    files = sorted(tmp_path.rglob("*.log*"))
    assert [path.name for path in files] == ["w0.log", "w0.log.1"]
    assert sum(path.stat().st_size for path in files) <= 2 * 4096
    assert files[0].read_text().endswith("line 1999\n")
    assert (files[0].stat().st_mode & 0o777, kept.problem) == (0o600, "")


def test_output_is_not_written_to_a_link_or_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's path can be guessed: another user may have made a file, a symbolic link or a hard
    link there. For the file, the process pretends to be another user."""
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
    assert "another user" in kept.problem and path.read_text() == ""


def test_all_directories_of_logs_are_private(tmp_path: Path) -> None:
    path = log_path(tmp_path / "root", "digits", "w0")
    kept = WorkerLog(path)
    kept.write("a line")
    kept.close()
    modes = {each.stat().st_mode & 0o777 for each in (path.parent, path.parent.parent)}
    assert (modes, kept.problem) == ({0o700}, "")


def test_following_continues_in_the_next_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that the command has not shown yet are in the earlier file. Ctrl-C ends it."""
    path = log_path(tmp_path, "digits", "w0")
    kept = WorkerLog(path)
    kept.write("before")
    printed = iter(("after", "", "and in the next file"))

    def print_more(seconds: float) -> None:
        line = next(printed, None)
        if line is None:
            raise KeyboardInterrupt
        if not line:
            kept.write("the last of this file")
            path.replace(worker_logs.older(path))
            kept.close()
        else:
            kept.write(line)

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=print_more))
    arguments = ["logs", "w0", "--job", "digits", "--log-dir", str(tmp_path), "-f"]
    assert main(arguments) == INTERRUPTED
    shown = ["before", "after", "the last of this file", "and in the next file"]
    assert capsys.readouterr().out.splitlines() == shown


def test_the_error_for_a_member_without_files_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["logs", "w9", "--job", "digits", "--log-dir", str(tmp_path), "--http", NOWHERE]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert "no output of member w9 of job digits is kept on this host" in errors


def test_a_log_that_cannot_be_written_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "digits").write_text("a file, where a directory should be")
    kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
    kept.write("a line")
    assert "digits" in kept.problem


def test_a_line_that_is_written_while_the_first_are_shown_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = WorkerLog(log_path(tmp_path, "digits", "w0"))
    kept.write("first")
    show, looks = logs._show, iter(range(1))

    def writes_meanwhile(lines: Sequence[str], member: str) -> None:
        show(lines, member)
        if list(lines) == ["first"]:
            kept.write("second")

    def looks_once(seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(logs, "_show", writes_meanwhile)
    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=looks_once))
    arguments = ["logs", "digits", "w0", "-f", "--log-dir", str(tmp_path)]
    assert main(arguments) == INTERRUPTED
    assert capsys.readouterr().out.splitlines() == ["first", "second"]


def test_files_are_removed_a_week_after_the_last_line(tmp_path: Path) -> None:
    """Each launcher makes new files. The file of a launcher that runs stays, also without lines."""
    root = tmp_path / "logs"
    paths = [log_path(root, "digits", name) for name in ("ended", "quiet", "new")]
    kept = [WorkerLog(path) for path in paths]
    for each in kept:
        each.write("line")
    kept[0].close()
    kept[2].close()
    older(paths[0]).touch()
    now_s = time.time()
    for path in paths[:2]:
        os.utime(path, (now_s - KEPT_S - 1, now_s - KEPT_S - 1))
    remove_old(root, now_s)
    assert {*(root / "digits").iterdir()} == {*paths[1:]}
    kept[1].close()
    root.chmod(0o770)
    remove_old(root, now_s + KEPT_S)
    assert paths[1].exists(), "another user could have put it there"
    root.chmod(0o700)
    remove_old(root, now_s + KEPT_S + 1)
    assert [*root.iterdir()] == []
