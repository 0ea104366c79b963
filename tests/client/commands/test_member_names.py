"""Commands with only a member's id, and commands that find the user's only cluster."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_client.cli import installed_commands, main, parse, read_config
from shoal_client.commands.address import StatusAddress
from shoal_client.commands.weights import weights
from shoal_client.connection.addresses import usual_coordinators
from shoal_client.local.access import LocalAccess
from shoal_client.local.worker_logs import WorkerLog, log_path
from shoal_proto.errors import InvalidSpec, Unavailable, UnknownJob, UnknownMember
from shoal_proto.tls import identity, local_clusters
from shoal_proto.tls.local_clusters import Announcement, LocalClusterRecord
from shoal_proto.tls.names import CertificateRole


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process with the environment of member w1."""
    code = "import sys; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    environment = {**os.environ, "SHOAL_MEMBER_ID": "w1"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        yield process
        process.kill()


def put_process(world: World, pid: int) -> None:
    """Make this pid the process of member w1 of `digits`, on a host named `here`."""
    members = [status_world.member("w0", 0), status_world.member("w1", 1)]
    process = members[1].process
    members[1] = status_world.member(
        "w1", 1, process=type(process)(**{**vars(process), "pid": pid, "host": "here"})
    )
    world.change("digits", members=tuple(members))


@pytest.mark.long
def test_a_members_id_alone_is_enough(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands `why` and `logs` find the job of a member that is named by its id alone."""
    world.put(status_world.job("other", members=(status_world.member("x0", 0),)))
    world.printed["w1"] = ["the loss is 1"]
    assert main(["why", "w1", "--http", url]) == 0
    assert "job digits" in capsys.readouterr().out
    assert main(["logs", "w1", "--http", url]) == 0
    assert capsys.readouterr().out == "the loss is 1\n"


@pytest.mark.long
def test_a_member_that_several_jobs_have_needs_its_job(world: World, url: str) -> None:
    world.put(status_world.job("other"))
    with pytest.raises(InvalidSpec, match="several jobs have a member w1; saw digits, other"):
        parse(["why", "w1", "--http", url])()


@pytest.mark.long
def test_the_error_for_an_unknown_member_names_members_and_a_command(url: str) -> None:
    """The error lists the known members and names `shoal status`. With `--job`, the error names
    only the command that lists the job's members."""
    with pytest.raises(UnknownMember, match=r"no job has a member w9; .*w0, w1.*`shoal status`"):
        parse(["drain", "w9", "--http", url])()
    with pytest.raises(UnknownMember, match="`shoal status --job digits` lists the members"):
        parse(["why", "w9", "--job", "digits", "--http", url])()


@pytest.mark.parametrize("command", ["why", "logs"])
def test_a_job_whose_workers_still_start_is_explained(world: World, url: str, command: str) -> None:
    """No job exists before the first worker has joined."""
    world.by_name.clear()
    with pytest.raises(UnknownJob) as raised:
        parse([command, "not-yet-joined", "--http", url])()
    assert "expected an existing job, or an existing member." in str(raised.value)
    assert "workers may still start" in str(raised.value)


@pytest.mark.parametrize("command", ["why", "logs"])
def test_a_name_of_no_job_and_no_member_is_refused_as_either(url: str, command: str) -> None:
    """The member may have been killed, and its new process may not have joined yet."""
    with pytest.raises(UnknownJob) as raised:
        parse([command, "w9", "--http", url])()
    text = str(raised.value)
    assert text.startswith("no job and no member is named w9; saw w9;"), text
    assert "expected one of digits, or one of w0, w1, w2." in text
    assert "`shoal status` lists jobs and members" in text


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("columns", ["80", "200"])
def test_status_shows_process_ids(
    world: World,
    url: str,
    columns: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    put_process(world, 4194000)
    assert main(["status", "--http", url]) == 0
    assert "4194000" in capsys.readouterr().out


@pytest.mark.long
def test_kill_ends_a_member_by_id(
    world: World,
    url: str,
    worker: "subprocess.Popen[bytes]",
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_process(world, worker.pid)
    assert main(["kill", "w1", "--http", url]) == 0
    assert worker.wait(60) == -9
    assert f"killed w1, pid {worker.pid}; `shoal events digits`" in capsys.readouterr().out


@pytest.mark.long
def test_kill_refuses_a_process_that_is_not_the_member(
    world: World, url: str, worker: "subprocess.Popen[bytes]"
) -> None:
    """The member is on another host, whose pid may belong to any process here."""
    put_process(world, os.getpid())
    with pytest.raises(InvalidSpec, match=f"on here; this host is {socket.gethostname()}"):
        parse(["kill", "w1", "--http", url])()
    assert worker.poll() is None


@pytest.mark.long
def test_the_last_members_of_a_job_without_any_are_named(
    world: World, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal logs` finds a job's last members in its generations: a restarted coordinator still has
    these, unlike events."""
    world.printed["w2"] = ["the end"]
    world.change("digits", members=())
    assert main(["logs", "digits", "--http", url]) == 0
    shown, errors = capsys.readouterr()
    assert "[w2] the end" in shown
    assert "these were the last: w0, w1, w2" in errors


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty folder for the records of this user's clusters."""
    monkeypatch.setattr(local_clusters, "PARENT", tmp_path)
    monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("SHOAL_HTTP", raising=False)
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    return tmp_path


def test_published_weights_are_asked_of_the_only_cluster(folder: Path) -> None:
    """Each action of `shoal weights` calls the only local cluster if no address is given."""
    only = cluster_at("127.0.0.1:41000", coordinators=["127.0.0.1:9"])
    for action in (["list"], ["pin", "a/b", "1"], ["rollback", "a/b", "--to", "1"]):
        config = read_config(["weights", *action], installed_commands())
        with pytest.raises(Unavailable, match=r"no coordinator answers at 127\.0\.0\.1:9;"):
            weights(config)
    only.close()


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    "command", ["stop", "retry", "rm", "wait", "accept-loss", "repair", "snapshot", "snapshots"]
)
def test_a_command_on_a_job_uses_the_only_cluster(folder: Path, command: str) -> None:
    """The command uses the address and the certificates of the only local cluster. If there are
    several, the command requires an address."""

    def addresses() -> Sequence[str]:
        config = read_config([command, "digits"], installed_commands())
        return config.call.addresses if hasattr(config, "call") else config.coordinators

    assert addresses() == ("127.0.0.1:7700",)
    page, coordinator = "127.0.0.1:41000", "127.0.0.1:41001"
    record = LocalClusterRecord(
        addresses=[coordinator, page], pages=[page], certificates=folder / "certs"
    )
    only = Announcement(record)
    assert addresses() == (coordinator,)
    with pytest.raises(InvalidSpec, match=f"in {folder / 'certs'}"):
        parse([command, "digits"])
    another = cluster_at("127.0.0.1:42000")
    with pytest.raises(InvalidSpec, match="you have several clusters on this machine"):
        addresses()
    assert read_config([command, "--help"], installed_commands()) is None
    only.close()
    another.close()


def cluster_at(*pages: str, coordinators: Sequence[str] = ()) -> Announcement:
    addresses = [*coordinators, *pages]
    return Announcement(
        LocalClusterRecord(addresses=addresses, pages=pages, certificates=Path("certs"))
    )


def test_the_status_address_is_that_of_the_only_cluster(folder: Path) -> None:
    assert StatusAddress().urls() == "http://127.0.0.1:7780"
    only = cluster_at("127.0.0.1:41000", "127.0.0.1:41001")
    assert StatusAddress().urls() == "http://127.0.0.1:41000,http://127.0.0.1:41001"
    assert [*StatusAddress().addresses] == ["http://127.0.0.1:41000", "http://127.0.0.1:41001"]
    other = cluster_at("127.0.0.1:42000")
    with pytest.raises(InvalidSpec, match=r"several clusters (?=.*41000)(?=.*42000).*--http URL"):
        StatusAddress().urls()
    with pytest.raises(InvalidSpec, match="several clusters"):
        parse(["logs", "digits"])
    usual = cluster_at("127.0.0.1:7780")
    assert StatusAddress().urls() == "http://127.0.0.1:7780"
    for each in (only, other, usual):
        each.close()


@pytest.mark.parametrize(
    ("options", "http", "coordinators"),
    [
        ([], "http://a:7780", ("a:7700", "b:7700")),
        (["--http", "http://c:7780"], "http://c:7780", ()),
        (["--coordinator", "c:7700"], "", ("c:7700",)),
        (["--http", "http://c:7780", "--coordinator", "c:7700"], "http://c:7780", ("c:7700",)),
    ],
)
@pytest.mark.usefixtures("folder")
def test_an_option_hides_the_variable_of_the_other_address(
    monkeypatch: pytest.MonkeyPatch, options: list[str], http: str, coordinators: tuple[str, ...]
) -> None:
    """The variables may be of another cluster than the one that the option names. Spaces after
    the commas of a variable are ignored."""
    monkeypatch.setenv("SHOAL_HTTP", "http://a:7780")
    monkeypatch.setenv("SHOAL_COORDINATOR", "a:7700, b:7700")
    for command in (["drain", "w-0"], ["status"], ["kill", "w-0"]):
        config = read_config([*command, *options], installed_commands())
        assert (config.address.http, tuple(config.address.coordinators)) == (http, coordinators)
    monkeypatch.setenv("SHOAL_ETCD", "a:2379, b:2379")
    assert read_config(["ps"], installed_commands()).etcd.endpoints == ("a:2379", "b:2379")


def test_files_of_workers_are_read_whatever_clusters_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shoal logs --log-dir` asks a cluster only for the host of a member without files."""
    clusters = [cluster_at(page) for page in ("127.0.0.1:41000", "127.0.0.1:42000")]
    kept = WorkerLog(log_path(folder, "digits", "w0"))
    kept.write("a line")
    kept.close()
    arguments = ["logs", "digits", "--log-dir", str(folder)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "a line\n"
    assert main([*arguments, "w1"]) == 1
    assert "no output of member w1 of job digits is kept on this host" in capsys.readouterr().err
    for each in clusters:
        each.close()


def test_a_cluster_without_tls_is_found_as_well(folder: Path) -> None:
    """A run's cluster at other addresses does not get the commands for it."""
    of_a_run = cluster_at("127.0.0.1:41000", coordinators=["127.0.0.1:41001"])
    insecure = LocalAccess({})
    insecure.make()
    insecure.announce(["127.0.0.1:7700"], ["http://127.0.0.1:7780"], etcd=())
    try:
        assert usual_coordinators() == ("127.0.0.1:7700",)
        assert StatusAddress().urls() == "http://127.0.0.1:7780"
        assert identity.files_at(["127.0.0.1:7700"], CertificateRole.OPERATOR) is None
    finally:
        insecure.close()
    assert usual_coordinators() == ("127.0.0.1:41001",)
    of_a_run.close()


def test_page_and_coordinator_are_those_of_one_cluster(folder: Path) -> None:
    """A cluster with either usual address is preferred for both."""
    first = cluster_at("127.0.0.1:8000", coordinators=["127.0.0.1:7700"])
    further = cluster_at("127.0.0.1:42000", coordinators=["127.0.0.1:42001"])
    assert StatusAddress().urls() == "http://127.0.0.1:8000"
    assert usual_coordinators() == ("127.0.0.1:7700",)
    another = cluster_at("127.0.0.1:7780", coordinators=["127.0.0.1:41001"])
    for address in (StatusAddress().urls, usual_coordinators):
        with pytest.raises(InvalidSpec, match=r"several clusters (?=.*8000)(?=.*41001)(?!.*42000)"):
            address()
    for each in (first, further, another):
        each.close()
