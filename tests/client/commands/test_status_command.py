"""`shoal status` and `shoal why` against a status endpoint."""

import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_client.cli import main, parse
from shoal_client.commands.status import Json, StatusClient
from shoal_proto.errors import Unavailable, UnknownJob, UnknownMember
from shoal_proto.health import CourseFigures, RunOrigin


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def shoal(*arguments: str) -> int:
    return parse(arguments)()


@pytest.mark.long
def test_status_shows_every_job_with_members_generations_and_servers(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in brackets is shown literally."""
    reason = "waits [for] 2 members"
    world.put(status_world.job("other", phase="collect", reason=reason, members=()))
    world.samples_of["digits"] = status_world.samples()
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    world.board.report("digits", "w1", status_world.health("w1", loss=float("nan"), step=1300))
    assert shoal("status", "--http", url) == 0
    shown = capsys.readouterr().out
    for text in ("digits", "running", "w1", "1300", "nothing: it trains", "unreachable", "NaN"):
        assert text in shown
    assert "5000 of 14370 completed" in shown
    assert f"ps1 accepts no further copies from ps0: {status_world.FULL}" in " ".join(shown.split())
    assert "skew of parameter bytes over servers: 1.250" in shown
    assert "round" not in shown
    assert reason in shown
    assert "all 3 members accepted generation 3" in shown


def test_status_shows_the_other_jobs_while_one_is_read(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new leader reads interrupted jobs last. The other coordinators do not lead."""
    world.put(status_world.job("other"))
    world.unread.add("other")
    assert shoal("status", "--http", url) == 1
    shown = capsys.readouterr()
    assert "digits" in shown.out
    assert "job other is being read from etcd" in shown.err
    with pytest.raises(Unavailable, match="job other is being read from etcd"):
        shoal("status", "--job", "other", "--http", url)


@pytest.mark.parametrize("command", ["status", "why w1"])
def test_a_job_that_is_removed_meanwhile_hides_no_other(
    world: World,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """Nor does a job that a new leader still reads hide the job of a member."""
    world.put(status_world.job("a-removed"))
    listed = StatusClient.jobs

    def jobs(client: StatusClient) -> Json:
        answer = listed(client)
        world.by_name.pop("a-removed", None)
        return answer

    monkeypatch.setattr(StatusClient, "jobs", jobs)
    assert shoal(*command.split(), "--http", url) == 0
    assert "digits" in capsys.readouterr().out
    world.put(status_world.job("a-read"))
    world.unread.add("a-read")
    with pytest.raises(Unavailable, match="job a-read is being read from etcd"):
        shoal("why", "w1", "--http", url)


@pytest.mark.long
def test_status_shows_the_rounds_of_members_with_clocks(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member that is ahead is shown with what it waits for."""
    reason = "w0 in round 13: the waiting member's next round is 17, the bound 3"
    slow = status_world.member("w0", 0, clock=13)
    world.change(
        "digits", members=(slow, status_world.member("w1", 1, clock=17, waiting_for=reason))
    )
    assert shoal("status", "--http", url) == 0
    shown = capsys.readouterr().out
    assert "round" in shown
    assert reason in shown
    assert shoal("why", "w1", "--job", "digits", "--http", url) == 0
    assert f"waits for: {reason}" in capsys.readouterr().out


@pytest.mark.long
def test_status_shows_which_weights_each_engine_serves(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines are shown with version and digest, and an alarm if the digest is not that of the
    version. The series of a script, which belongs to no job, is shown as well."""
    world.published += [status_world.published(), status_world.published("svc/r", differs=True)]
    assert shoal("status", "--http", url) == 0
    shown = capsys.readouterr().out
    assert "weights digits/policy: version 57 of step 1200, 3.0 MiB in 2 copies, 1 kept" in shown
    assert "serve 57 abababababab: engine-0" in shown
    alarm = "served weights differ: engine-0 has other bytes than version 57 of svc/r: digest cdcd"
    assert shown.count(alarm) == 1 and shown.index("svc/r") < shown.index(alarm)
    assert shoal("status", "--http", url, "--job", "digits") == 0
    assert "svc/r" not in capsys.readouterr().out


@pytest.mark.long
def test_status_can_be_limited_to_one_job(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is `--job`."""
    world.put(status_world.job("other"))
    assert shoal("status", "--http", url, "--job", "other") == 0
    assert "digits" not in capsys.readouterr().out


@pytest.mark.long
def test_status_as_json_equals_the_api(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has all jobs with members and shards."""
    assert shoal("status", "--http", url, "--json") == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert job["summary"]["job"] == "digits"
    assert len(job["members"]) == 3
    assert job["shards"] == {
        "servers": [],
        "shards": [],
        "skew": 1.0,
        "lost": [],
        "lost_in_words": [],
        "accepted_losses": [],
    }


@pytest.mark.long
def test_status_without_jobs_is_no_error(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output names that there are none."""
    world.by_name.clear()
    assert shoal("status", "--http", url) == 0
    assert "has no jobs" in capsys.readouterr().out


@pytest.mark.long
def test_why_shows_what_a_member_waits_for(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output also shows the job's reason and the member's last error."""
    waiting = status_world.member("w9", state="waiting", waiting_for="other members")
    world.change("digits", members=(waiting,), phase="collect", reason="1 of 2 are ready")
    world.board.report("digits", "w9", status_world.health("w9", last_error="peer reset"))
    assert shoal("why", "w9", "--job", "digits", "--http", url) == 0
    shown = capsys.readouterr().out
    assert "w9 (waiting) waits for: other members" in shown
    assert "1 of 2 are ready" in shown
    assert "peer reset" in shown
    assert shoal("why", "w9", "--job", "digits", "--http", url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["waiting_for"] == "other members"


@pytest.mark.long
def test_an_unknown_name_is_the_coordinators_error(url: str) -> None:
    """The command raises the class of error that the coordinator answered with, and lists the
    members or jobs that exist."""
    with pytest.raises(UnknownMember, match="one of w0, w1, w2"):
        shoal("why", "w7", "--job", "digits", "--http", url)
    with pytest.raises(UnknownJob, match="one of digits"):
        shoal("status", "--job", "nope", "--http", url)


@pytest.mark.long
def test_status_shows_command_and_commit(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has them as well, and the hyperparameters."""
    run = RunOrigin(command="train.py --lr 0.1", commit="5f" * 20, is_modified=True)
    course = CourseFigures(run=run)
    world.board.report("digits", "w0", status_world.health("w0", course=course))
    assert main(["status", "--http", url]) == 0
    assert "runs train.py --lr 0.1  (commit 5f5f5f5f5f5f, modified)" in capsys.readouterr().out
    assert main(["status", "--http", url, "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert job["run"]["command"] == "train.py --lr 0.1"
    assert job["hyperparameters"]["global_batch"] == "256"


@pytest.mark.parametrize("address", ["http://127.0.0.1:{port}", "nonsense", "http://[bad"])
def test_the_error_for_an_unreachable_coordinator_names_the_option(address: str) -> None:
    """The error also names the environment variable."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match=r"--http URL or \$SHOAL_HTTP"):
        shoal("status", "--http", address.format(port=port))


def test_a_web_server_that_is_no_coordinator_is_recognised() -> None:
    """The error is Unavailable."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unavailable, match="does not answer like a Shoal coordinator"):
            shoal("status", "--http", f"http://127.0.0.1:{other.getsockname()[1]}")
        thread.join()


@pytest.mark.long
def test_the_address_comes_from_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable is $SHOAL_HTTP."""
    monkeypatch.setenv("SHOAL_HTTP", url)
    assert shoal("status") == 0
    assert "digits" in capsys.readouterr().out


@pytest.mark.long
def test_status_fits_into_eighty_columns(
    world: World, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text is cut; a member that does not train has a line of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    long_wait = "w1 to finish its step before the new generation can start from there"
    waits = status_world.member("w2", 2, state="bringing-up", waiting_for=long_wait)
    world.change("digits", members=(status_world.member("w0", 0), waits))
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    assert shoal("status", "--http", url) == 0
    output = capsys.readouterr().out
    assert "…" not in output
    assert max(len(line.rstrip()) for line in output.splitlines()) <= 80
    assert f"w2 waits for: {long_wait}" in " ".join(output.split())
    for name in ("address", "limit MiB", "unreachable"):
        assert name in output


@pytest.mark.long
def test_why_of_a_job_shows_what_its_members_wait_for(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cause is shown once for all members with it."""
    away = "w0, which has been in your code for 54 s"
    first = status_world.member("w0", 0, waiting_for="nothing: it has been in your code for 54 s")
    others = [status_world.member(f"w{rank}", rank, waiting_for=away) for rank in (1, 2)]
    world.change("digits", members=(first, *others), reason="generation 3: 3 begin")
    assert shoal("why", "digits", "--http", url) == 0
    assert capsys.readouterr().out.splitlines() == [
        "digits (running): generation 3: 3 begin",
        "w0 waits for: nothing: it has been in your code for 54 s",
        f"w1, w2 wait for: {away}",
    ]


FORGED = "\x1b[2J\x1b]0;mine\x07\n12:00:00 generation 9: all is well\u202e"
"""A text that clears the screen, sets the window's title, begins a line and reverses later text."""


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("command", "columns"),
    [("status", "80"), ("status", "200"), ("top", "200")]
    + [(name, "80") for name in ("why", "why-member", "events", "top", "jobs")],
)
def test_text_of_members_has_no_control_characters(
    world: World,
    url: str,
    capsys: pytest.CaptureFixture[str],
    *,
    command: str,
    columns: str,
) -> None:
    """Members may send any text as host, reason, error, device or logged name."""
    os.environ["COLUMNS"] = columns
    first = status_world.member("w0", 0, waiting_for=FORGED, state="collecting")
    first = replace(first, process=replace(first.process, host=FORGED))
    world.change("digits", reason=FORGED, members=(first,))
    logged = CourseFigures(logged={FORGED: (3, 0.5)})
    health = status_world.health("w0", last_error=FORGED, device=FORGED, course=logged)
    world.board.report("digits", "w0", health)
    world.board.event("digits", "member_lost", FORGED)
    arguments = {
        "why": ["why", "digits"],
        "why-member": ["why", "w0", "--job", "digits"],
        "events": ["events", "digits"],
        "top": ["top", "digits", "--once"],
    }.get(command, [command])
    assert shoal(*arguments, "--http", url) == 0
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    lines = [line for line in shown.splitlines() if line.startswith("12:00:00 generation 9")]
    # Line breaks are kept only in a member's last error.
    assert len(lines) == (command == "why-member")


@pytest.mark.long
def test_errors_have_no_control_characters(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error repeats an argument with control characters."""
    assert main(["status", "--http", url, "--job", FORGED]) == 2
    errors = capsys.readouterr().err
    assert "bad name of a job" in errors
    assert not {"\x1b", "\x07", "\u202e"} & set(errors)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfes\x00h\x00", "shoal_tök".encode()],
    ids=["UTF-16", "umlaut"],
)
def test_a_file_without_a_token_is_refused_by_name(
    tmp_path: Path,
    content: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    assert main(["status", "--http", "http://127.0.0.1:1"]) == 1
    assert "the token in $SHOAL_TOKEN_FILE" in capsys.readouterr().err


def test_a_token_may_follow_a_byte_order_mark(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xef\xbb\xbfshoal_x\r\n")
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    assert main(["status", "--http", url]) == 0
