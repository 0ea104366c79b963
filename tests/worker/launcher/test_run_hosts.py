"""`shoal run --hosts`, with an `ssh` on PATH that runs its command on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from cryptography import x509
from support.processes import commands

from shoal.launcher import over_ssh
from shoal.launcher.hosts import HostOptions, RunHost, parse_hosts
from shoal.launcher.run_config import RunConfig
from shoal_client.cli import main
from shoal_client.host.stop_orders import StopOrders
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.remote.ssh import MARK
from shoal_proto.errors import InvalidSpec, Unavailable

DEADLINE_S = 180.0
finish = partial(commands.finish, within_s=DEADLINE_S)
SSH = """#!/bin/sh
# Takes `ssh OPTION... -- HOST COMMAND`; there is no host "gone", and "moved" has no such folder.
echo "$*" >> "$SSH_LOG"
while [ "$1" != -- ]; do shift; done
case $2 in
    gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255 ;;
    moved) exec sh -c "$(echo "$3" | sed 's/[$]HOME/nowhere/')" ;;
    slow) exec sleep 600 ;;
esac
echo "Welcome to $2"
# A start-up file of a shell prints a text without a line's end.
if [ "$2" = b ]; then printf "from .bashrc: "; fi
# A host does not have this machine's variables.
for name in $(env | sed -n 's/^\\(SHOAL_[A-Z_]*\\)=.*/\\1/p'); do unset "$name"; done
export HOST_NAME="$2" SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22"
exec sh -c "$3"
"""
SHOW = """
import os, stat, sys
print("shown", os.environ["HOST_NAME"], os.environ["SHOAL_LOCAL_WORLD_SIZE"],
      os.environ["SHOAL_MIN_MEMBERS"], os.environ["SHOAL_DESIRED_MEMBERS"],
      os.environ["SHOAL_JOB_SECRET"], os.environ.get("SHOAL_ADDRESS"), os.getcwd(), sys.argv[1:])
"""
WAIT = "import os, signal; print('pid', os.getpid(), os.getppid(), flush=True); signal.pause()"
TRAIN = """
import os, pathlib
import shoal, torch

folder = pathlib.Path(os.environ["SHOAL_TLS_CERT"]).parent
modes = sorted({path.stat().st_mode & 0o777 for path in [folder, *folder.iterdir()]})
names = sorted(path.name for path in folder.iterdir())
print("folder", folder, [oct(mode) for mode in modes], names, flush=True)
kept = pathlib.Path(f"{os.environ['SHOAL_MEMBER_ID']}.pem")
kept.write_bytes((folder / "worker.crt").read_bytes())
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = (torch.randn(60, 4), torch.randn(60, 1))
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    for batch in session.batches(data, global_batch_size=6, epochs=1):
        with session.step():
            session.forward_backward(batch, torch.nn.functional.mse_loss)
    print("trained with", session.world_size, flush=True)
"""


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a coordinator that listens on loopback, at an address that the launcher does not
    recognise as loopback."""
    config = LocalClusterConfig(
        directory=tmp_path_factory.mktemp("cluster"),
        num_parameter_servers=0,
        parameters=False,
        listen="127.0.0.2:0",
    )
    with LocalCluster(config) as cluster:
        yield cluster.coordinator


Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run_hosts(tmp_path: Path) -> Iterator[Run]:
    """Function that starts `shoal run --hosts HOSTS OPTIONS train.py ARGUMENTS` in a folder with an
    odd name."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    folder = tmp_path / "it's $HOME"
    folder.mkdir()

    def start(
        script: str, hosts: str, *options: str, arguments: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[str]:
        (folder / "train.py").write_text(script)
        environment = {name: v for name, v in os.environ.items() if not name.startswith("SHOAL_")}
        environment |= {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SSH_LOG": str(tmp_path / "ssh.log"),
            "SHOAL_LOG_DIR": str(tmp_path / "logs"),
            # The user is logged in by ssh, through a router.
            "SSH_CONNECTION": "203.0.113.7 50000 10.0.0.1 22",
            **variables,
        }
        words = ("run", "--hosts", hosts, *options, "train.py", *arguments)
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal_client", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=folder,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def pids_of(process: "subprocess.Popen[str]", number: int) -> dict[str, tuple[int, int]]:
    """Return the pids of each host's worker and launcher, once `number` hosts have begun."""
    found: dict[str, tuple[int, int]] = {}
    assert process.stdout is not None
    for line in process.stdout:
        host, _, text = line.partition(": ")
        if "] pid " in text:
            worker, launcher = text.rpartition("] pid ")[2].split()
            found[host] = int(worker), int(launcher)
        if len(found) == number:
            return found
    raise AssertionError(f"only {found} began")


def await_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"{left} run on"
        time.sleep(0.05)


def test_hosts_are_read_as_a_user_writes_them() -> None:
    assert parse_hosts("a, me@b.example:4,[fd00::1]:gpu,me@[fd00::2],localhost:auto") == (
        RunHost("a"),
        RunHost("me@b.example", "4"),
        RunHost("fd00::1", "gpu"),
        RunHost("me@fd00::2"),
        RunHost("localhost", "auto"),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hosts=-oProxyCommand=x",), "bad host; saw '-oProxyCommand=x'"),
        (("--hosts", "a,b;reboot"), "bad host; saw 'b;reboot'"),
        (("--hosts", "a@-b"), "bad host; saw 'a@-b'"),
        (("--hosts", "a b"), "bad host; saw 'a b'"),
        (("--hosts", "$(reboot)"), "bad host; saw '$(reboot)'"),
        (("--hosts", "[a.b]"), "bad host; saw '[a.b]'"),
        (("--hosts", "a:0"), "no workers; saw a:0; expected at least 1"),
        (("--hosts", "a,b:2222"), "too many workers for a host; saw b:2222"),
        (("--hosts", "fd00::1"), "saw 'fd00::1'; expected HOST, HOST:N, USER@HOST:N or [IPv6"),
        (("--hosts", "a:many"), "bad number of workers of a; saw 'many'"),
        (("--hosts", "a:1,a:2"), "a host is given twice; saw a"),
        (("--hosts", "a,b", "--nnodes", "3"), "does not fit --hosts; saw --nnodes 3 with 2 hosts"),
        (("--hosts", "a,b", "--nnodes", "x:y"), "does not fit --hosts"),
        (("--hosts", "a", "--insecure"), "--insecure is for a cluster on one machine"),
        (("--hosts", "a", "--coordinator", "127.0.1.1:7700"), "cannot reach the coordinator"),
        (("--hosts", "a", "--coordinator", "LOCALHOST:7700"), "cannot reach the coordinator"),
        (("--host-python", "x"), "--host-python and --host-address are for --hosts"),
    ],
)
def test_bad_hosts_are_refused_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: str,
) -> None:
    """The error is one line, with exit code 2. A name cannot become an option of ssh or a
    command."""
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    (tmp_path / "train.py").touch()
    assert main(["run", *options, str(tmp_path / "train.py")]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "num_workers", "min_members"),
    [
        (("--nnodes", "2:3"), [3, 2, 3], 5),
        (("--nnodes", "3"), [8, 2, 2], 12),
        (("--nnodes", "1:3"), [8, 2, 2], 2),
        (("--nnodes", "2:3"), [8, 2], 10),
        (("--nnodes", "2:3", "--min", "9"), [8, 2, 2], 9),
        (("--nnodes", "2:3"), [8, 2, 2], None),
        (("--nnodes", "2:3"), [4, 2, 2], None),
        ((), [8, 2, 2], 1),
    ],
)
def test_fewer_hosts_than_nnodes_needs_never_train(
    options: tuple[str, ...], num_workers: list[int], min_members: int | None
) -> None:
    """The bound is a number of workers. If no number of workers tells these numbers of hosts apart,
    the run is refused."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    hosts = HostOptions(hosts=parse_hosts("a,b,c"), num_nodes=given.get("--nnodes", ""))
    least = int(given.get("--min", 1))
    config = RunConfig(script=["train.py"], over_ssh=hosts, min_members=least, environment={})
    if min_members is not None:
        assert config.on_hosts(num_workers).min_members == min_members
        return
    with pytest.raises(InvalidSpec, match=r"fewer hosts than --nnodes.*4 are enough.*Give --min"):
        config.on_hosts(num_workers)


@pytest.mark.long
def test_each_host_has_a_launcher_with_its_number_of_workers(
    run_hosts: Run, coordinator: str, tmp_path: Path
) -> None:
    """Arguments, folder and variables arrive unchanged. Unusable hosts are named, and the others
    train without them."""
    arguments = ("--lr", "1 2", "it's", "$(id)", "-n")
    code, output = finish(
        run_hosts(
            SHOW,
            "a,gone,b:2,moved,localhost",
            *("-n", "3", "--coordinator", coordinator, "--nnodes", "2:5"),
            arguments=arguments,
            SHOAL_JOB_SECRET="not-for-other-users",
            SHOAL_ADDRESS="10.0.0.1",
            HOST_NAME="localhost",
        )
    )
    assert code == 0, output
    assert "gone is left out: ssh: connect to host gone port 22: No route to host" in output
    assert "moved is left out: Welcome" not in output
    missing = tmp_path / "it's nowhere"
    assert f"moved is left out: no such directory: {missing}" in output
    assert "workers: 3 on a, 2 on b, 3 on localhost" in output
    shown = [line for line in output.splitlines() if "] shown " in line]
    folder = tmp_path / "it's $HOME"
    assert len(shown) == 8
    for line in shown:
        host = line.partition(": ")[0]
        number = 2 if host == "b" else 3
        address = "10.0.0.1" if host == "localhost" else None
        known = f"{host} {number} 5 8 not-for-other-users {address} {folder}"
        assert line.endswith(f"] shown {known} {list(arguments)}")
    called = (tmp_path / "ssh.log").read_text()
    for option in ("BatchMode=yes", "ConnectTimeout=10", "RemoteCommand=none", "ControlPath=none"):
        assert called.count(option) == 4
    assert "not-for-other-users" not in called, "every user of the host sees its command line"


@pytest.mark.long
def test_a_script_that_fails_gives_its_exit_code(run_hosts: Run, coordinator: str) -> None:
    code, output = finish(run_hosts("raise SystemExit(3)", "a,b", "--coordinator", coordinator))
    assert code == 3, output


@pytest.mark.long
def test_without_any_usable_host_nothing_runs(run_hosts: Run) -> None:
    code, output = finish(run_hosts(SHOW, "gone,moved"))
    assert code == 1
    assert "too few hosts can be used; saw 0 of 2; expected at least 1" in output
    assert "ssh -o BatchMode=yes -o ControlPath=none HOST true" in output
    assert "cluster" not in output
    code, output = finish(run_hosts(SHOW, "gone,a", "--nnodes", "2"))
    assert code == 1
    assert "saw 1 of 2; expected at least 2" in output


def test_a_host_that_does_not_answer_is_named_soon(
    run_hosts: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it up to a limit; then it is left out."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_LOG", str(tmp_path / "ssh.log"))
    monkeypatch.setattr(over_ssh, "SLOW_S", 0.1)
    monkeypatch.setattr(over_ssh, "GREETING_S", 0.5)
    config = RunConfig(
        script=["train.py"], over_ssh=HostOptions(hosts=parse_hosts("slow")), environment={}
    )
    said: list[str] = []
    with (
        over_ssh.HostLaunchers(config, StopOrders(), said.append) as hosts,
        pytest.raises(Unavailable, match="saw 0 of 1"),
    ):
        hosts.connect()
    assert said == [
        "no answer yet from slow; they have 0.5 s in all",
        "slow is left out: no answer within 0.5 s",
    ]


MakeHosts = Callable[[str, str, Callable[[str], None]], over_ssh.HostLaunchers]
HOST = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
trap "" TERM
echo '{greeting}'
read -r launch_order
"""


@pytest.fixture
def fake_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeHosts:
    """Function that makes launchers on the named hosts, which greet and then run lines of sh."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(names: str, lines: str, say: Callable[[str], None]) -> over_ssh.HostLaunchers:
        greeting = {"version": version("shoal"), "num_workers": 1, "seen_address": ""}
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(HOST.format(greeting=MARK + json.dumps(greeting)) + lines)
        ssh.chmod(0o755)
        options = HostOptions(hosts=parse_hosts(names))
        config = RunConfig(
            script=["train.py"],
            over_ssh=options,
            job="j",
            coordinators=["10.0.0.1:7700"],
            environment={},
        )
        return over_ssh.HostLaunchers(config, StopOrders(), say)

    return make


@pytest.mark.parametrize(("first", "expected"), [("given up", 1), ("reader gone", 130)])
def test_hosts_get_one_order_to_drain_and_one_to_kill(
    fake_hosts: MakeHosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    expected: int,
) -> None:
    """Ctrl-C after the run has begun to end is not a second signal."""
    monkeypatch.setattr(over_ssh, "phase_of", lambda addresses, job, limit_s: "running")
    reading, writing = os.pipe()
    os.close(reading)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith(("ending", "the reader", "SIGINT")):
            signal.raise_signal(signal.SIGINT)

    num_orders = tmp_path / "orders"
    lines = f"echo begins; n=0; while read -r line; do n=$((n + 1)); done; echo $n > {num_orders}"
    with os.fdopen(writing, "w") as unread:
        if first == "reader gone":
            monkeypatch.setattr(sys, "stdout", unread)
        with fake_hosts("a", lines, say) as hosts:
            config = hosts.connect()
            if first == "given up":
                hosts.give_up("etcd cannot stay up")
            code = hosts.run(config)
    assert said[1:] == [
        "ending the workers: etcd cannot stay up"
        if first == "given up"
        else "the reader of stdout has ended: workers finish their step and end",
        "SIGINT: workers finish their step and end; a second signal kills them",
        "SIGINT: workers are killed",
        "SIGINT: workers are killed",
        "job j is running",
        f"exit code {expected}",
    ]
    assert code == expected
    assert num_orders.read_text() == "2\n"


@pytest.mark.parametrize(("phase", "expected"), [("running", 0), ("finished", 137)])
def test_a_worker_that_is_killed_counts_only_after_its_job_was_completed(
    fake_hosts: MakeHosts,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    expected: int,
) -> None:
    """An evaluation that was killed has no result. While the job trains, others go on without the
    killed worker. `phase`: the job's, when the launcher of the killed worker ends."""
    phases = iter([phase, "finished"])
    monkeypatch.setattr(over_ssh, "phase_of", lambda addresses, job, limit_s: next(phases))
    lines = f"""case $2 in
        a) echo '{MARK}{{"exit_code": 137}}' ;;
        b) echo '{MARK}{{"exit_code": 0}}' ;;
    esac"""
    said: list[str] = []
    with fake_hosts("a,b", lines, said.append) as hosts:
        assert hosts.run(hosts.connect()) == expected, said


@pytest.mark.parametrize(("phase", "expected"), [("running", 0), ("finished", 130)])
def test_a_host_that_is_drained_counts_only_after_its_job_was_completed(
    fake_hosts: MakeHosts,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    expected: int,
) -> None:
    """Ctrl-C in the last step: host a leaves, and host b completes the job. `phase`: the job's,
    when the launcher of host a ends."""
    phases = iter([phase, "finished"])
    monkeypatch.setattr(over_ssh, "phase_of", lambda addresses, job, limit_s: next(phases))
    said: list[str] = []
    with fake_hosts("a,b", lines_after_ctrl_c(a=130, b=0), said.append) as hosts:
        assert hosts.run(hosts.connect()) == expected, said


def test_after_ctrl_c_one_wait_for_a_coordinator_is_enough(
    fake_hosts: MakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait for coordinators that are gone takes half a minute."""
    asked: list[str] = []

    def phase_of(addresses: list[str], job: str, limit_s: float) -> str:
        asked.append(job)
        raise Unavailable("no coordinator answers")

    monkeypatch.setattr(over_ssh, "phase_of", phase_of)
    with fake_hosts("a,b", lines_after_ctrl_c(a=130, b=130), print) as hosts:
        assert hosts.run(hosts.connect()) == 130
    assert asked == ["j"]


def lines_after_ctrl_c(**codes: int) -> str:
    """Lines for `fake_hosts`: the first host sends this process a SIGINT, and each host's launcher
    ends with its exit code when it gets the order to drain."""
    endings = (f"{name}) echo '{MARK}{{\"exit_code\": {code}}}' ;;" for name, code in codes.items())
    interrupt = f"if [ $2 = {next(iter(codes))} ]; then kill -INT {os.getpid()}; fi"
    return "\n".join((interrupt, "read -r drain_order", "case $2 in", *endings, "esac"))


@pytest.mark.long
def test_ctrl_c_ends_all_hosts(run_hosts: Run, coordinator: str) -> None:
    run = run_hosts(WAIT, "a,b", "--coordinator", coordinator)
    pids = pids_of(run, 2)
    run.send_signal(signal.SIGINT)
    code, output = finish(run)
    assert code == 130
    assert "SIGINT: workers finish their step and end; a second signal kills them" in output
    await_gone([pid for pair in pids.values() for pid in pair])


@pytest.mark.long
def test_nothing_on_a_host_outlives_the_command(run_hosts: Run, coordinator: str) -> None:
    """A host notices the end of the connection, also after a SIGKILL of the command."""
    run = run_hosts(WAIT, "a,b", "--coordinator", coordinator)
    pids = pids_of(run, 2)
    run.kill()
    await_gone([pid for pair in pids.values() for pid in pair])


@pytest.mark.long
def test_a_lost_host_is_named_and_the_others_go_on(run_hosts: Run, coordinator: str) -> None:
    run = run_hosts(WAIT, "a,b", "--coordinator", coordinator)
    pids = pids_of(run, 2)
    os.kill(pids["a"][1], signal.SIGKILL)
    assert run.stdout is not None
    assert any("a was lost: its connection has ended" in line for line in run.stdout)
    assert Path(f"/proc/{pids['b'][0]}").exists()
    run.send_signal(signal.SIGTERM)
    assert finish(run)[0] == 143


@pytest.mark.long
def test_hosts_train_with_a_cluster_and_keys_of_the_run(run_hosts: Run, tmp_path: Path) -> None:
    """Keys are in a folder that only the user can read; they are for this job alone, and are
    removed."""
    code, output = finish(run_hosts(TRAIN, "a,b:2", "--ps", "0", "--job", "digits"))
    assert code == 0, output
    assert "job digits is finished" in output
    assert output.count("trained with 3") == 3
    folders = {line.split()[3] for line in output.splitlines() if "] folder " in line}
    assert len(folders) == 2, "one for each host"
    assert output.count("['0o600', '0o700'] ['ca.crt', 'worker.crt', 'worker.key']") == 3
    assert not [folder for folder in folders if Path(folder).exists()]
    for path in (tmp_path / "it's $HOME").glob("*.pem"):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == ["spiffe://shoal/worker/worker/job/digits"]
