"""The job group for SkyPilot: its contents, and the script of its nodes, run on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.cli import installed_commands, read_config
from shoal_client.local.etcd import find_etcd
from shoal_proto.tls.names import CertificateRole

FOLDER = Path(__file__).parents[2] / "deploy" / "skypilot"
TASKS, SCRIPT = FOLDER / "shoal.sky.yaml", FOLDER / "node.sh"
DEADLINE_S = 120
SCRIPT_OF_A_USER = """
import shoal, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="ddp")
    torch.manual_seed(0)
    data = torch.randn(64, 8), torch.randn(64, 1)
    both = False
    for batch in session.batches(data, global_batch_size=8, epochs={epochs}):
        with session.step():
            session.backward(torch.nn.functional.mse_loss(model(batch.inputs), batch.targets))
        if session.world_size == 2 and not both:
            both = True
            print("both train", flush=True)
print("trained", flush=True)
"""


@pytest.fixture
def group() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    header, *tasks = yaml.safe_load_all(TASKS.read_text())
    return header, {task["name"]: task for task in tasks}


def test_skypilot_reads_the_job_group() -> None:
    """The schemas are SkyPilot's own, used if it is installed."""
    pytest.importorskip("sky")
    from sky.utils import dag_utils  # noqa: PLC0415

    dag = dag_utils.load_job_group_from_yaml(str(TASKS))
    assert dag.primary_tasks == ["worker-0", "worker-1", "worker-2"]


def test_a_node_has_the_keys_that_it_uses(
    group: tuple[dict[str, Any], dict[str, dict[str, Any]]],
) -> None:
    """Mounted files have the names of the certificates' files, no node gets the authority's key,
    and all workers are alike."""
    header, tasks = group
    workers = [name for name in tasks if name != "cluster"]
    assert header["execution"] == "parallel" and header["primary_tasks"] == workers
    keys = {
        name: {Path(to).name for to in task["file_mounts"] if to.endswith(".key")}
        for name, task in tasks.items()
    }
    assert keys.pop("cluster") == {"coordinator.key", "server.key", "operator.key"}
    assert all(of_worker == {"worker.key", "viewer.key"} for of_worker in keys.values())
    made = {f"{role.value}.{kind}" for role in CertificateRole for kind in ("crt", "key")} | {
        "ca.crt"
    }
    for task in tasks.values():
        for to, source in task["file_mounts"].items():
            if source.startswith("~/.shoal/sky/"):
                assert Path(source).name == Path(to).name and Path(to).name in made
            else:
                assert (FOLDER.parents[1] / source) == SCRIPT
        assert task["envs"]["SHOAL_HEAD"] == f"cluster-0.{header['name']}"
    assert len({str({**tasks[name], "name": ""}) for name in workers}) == 1, "all alike"
    assert tasks[workers[0]]["envs"]["SHOAL_MAX_MEMBERS"] == str(len(workers))


@pytest.mark.parametrize(("machine", "named"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_a_node_gets_the_etcd_of_its_machine(
    group: tuple[dict[str, Any], dict[str, dict[str, Any]]],
    tmp_path: Path,
    machine: str,
    named: str,
) -> None:
    _, tasks = group
    record = tmp_path / "record"
    for program in ("pip", "curl", "tar", "sudo"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@" >> {record}\n')
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", tasks["cluster"]["setup"]], env=given, check=True)
    lines = record.read_text().splitlines()
    fetched = next(line.split()[-1] for line in lines if line.startswith("curl"))
    assert fetched.endswith(f"/v3.5.21/etcd-v3.5.21-linux-{named}.tar.gz")
    installed = f"sudo install etcd-v3.5.21-linux-{named}/etcd /usr/local/bin/etcd"
    assert installed in lines


def test_every_etcd_compacts_its_history() -> None:
    """Without compaction etcd's database grows until its quota refuses writes."""
    deploy = Path(__file__).parents[2]
    tracked = [path for path in (deploy / "deploy").rglob("*") if path.is_file()]
    etcds = [
        path
        for path in (*tracked, deploy / "docker-compose.yml")
        if b"--listen-client-urls" in path.read_bytes()
    ]
    assert len(etcds) >= 5
    assert [path for path in etcds if b"--auto-compaction-retention" not in path.read_bytes()] == []


def test_shellcheck_accepts_the_script() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck on PATH")
    done = subprocess.run([program, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def free_ports() -> int:
    """The first of 20 free ports in a row, below the range of outgoing connections."""
    for first in range(20_000 + os.getpid() % 500 * 20, 32_000, 20):
        try:
            for port in range(first, first + 20):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no 20 ports in a row are free")


def environment(folder: Path) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir()
    (programs / "etcd").symlink_to(find_etcd())
    CertificateFolder(folder / "certs").init()
    return {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SHOAL_HEAD": "localhost",
        "SHOAL_PORT": str(free_ports()),
        "SHOAL_JOB": "train",
        "SHOAL_MIN_MEMBERS": "1",
        "SHOAL_MAX_MEMBERS": "2",
        "SHOAL_AWAIT_S": str(DEADLINE_S),
        "PARAMETER_SERVERS": "1",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def node(
    given: Mapping[str, str], folder: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a node's task with its certificates; stop it at the end as SkyPilot does."""
    certs = folder / "certs"
    certs.mkdir(parents=True)
    tasks = {task["name"]: task for task in list(yaml.safe_load_all(TASKS.read_text()))[1:]}
    mounts = tasks["cluster" if arguments[0] == "cluster" else "worker-0"]["file_mounts"]
    for to in mounts:
        if "/shoal-certs/" in to:
            shutil.copy(folder.parent / "certs" / Path(to).name, certs)
    process = subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        env={**given, "SHOAL_DIR": str(folder / "shoal"), "SHOAL_TLS": str(certs)},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(DEADLINE_S)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The process' output up to a line with these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"it ended without {words!r}:\n{''.join(lines)}")


@pytest.mark.long
def test_spot_nodes_train_over_tls_and_drain_at_sigterm(tmp_path: Path) -> None:
    """A node that gets SIGTERM leaves the job and ends with 143, and the other one trains to the
    end; the cluster ends with 143 when SkyPilot stops it."""
    given = environment(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT_OF_A_USER.format(epochs=400))
    with (
        node(given, tmp_path / "cluster", "cluster") as cluster,
        node(given, tmp_path / "one", "worker", "train.py") as stays,
        node(given, tmp_path / "two", "worker", "train.py") as leaves,
    ):
        read_until(leaves, "both train")
        leaves.send_signal(signal.SIGTERM)
        assert leaves.wait(DEADLINE_S) == 143
        read_until(stays, "trained")
        assert stays.wait(DEADLINE_S) == 0
        cluster.terminate()
        assert cluster.wait(DEADLINE_S) == 143
        logs = {path.name: path.read_text() for path in (tmp_path / "cluster/shoal").glob("*.log")}
    assert set(logs) == {"etcd.log", "coordinator.log", "ps-0.log", "status.log"}
    assert "ports_open_to_others" not in "".join(logs.values()), "nothing is served without TLS"


@pytest.mark.long
def test_the_task_of_a_cluster_ends_with_any_of_its_parts(tmp_path: Path) -> None:
    """The task ends, so that SkyPilot starts it again."""
    given = environment(tmp_path)
    with (
        socket.create_server(("127.0.0.1", int(given["SHOAL_PORT"]))),
        node(given, tmp_path / "cluster", "cluster") as cluster,
    ):
        assert "a part of the cluster has ended" in read_until(cluster, "has ended")
        assert cluster.wait(DEADLINE_S) == 1
        text = (tmp_path / "cluster" / "shoal" / "coordinator.log").read_text()
    assert "cannot listen" in text


@pytest.mark.parametrize(
    ("numbers", "desired"), [(("1", "1", "3"), 1), (("1", "2", "3"), 2), (("8", "1", "4"), 4)]
)
def test_a_node_has_workers_for_any_bounds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[str, str, str],
    desired: int,
) -> None:
    """The job begins with the first node's workers, within the bounds."""
    workers, least, most = numbers
    program = tmp_path / "bin" / "shoal"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$1" = status ] || echo "$@"\n')
    program.chmod(0o755)
    given = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SHOAL_TLS": str(tmp_path),
        "SHOAL_HEAD": "localhost",
        "SHOAL_JOB": "train",
        "SHOAL_WORKERS": workers,
        "SHOAL_MIN_MEMBERS": least,
        "SHOAL_MAX_MEMBERS": most,
    }
    done = subprocess.run(
        ["bash", SCRIPT, "worker", "train.py"],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    monkeypatch.setenv("SHOAL_COORDINATOR", "localhost:7700")
    run = read_config(done.stdout.split(), installed_commands())
    assert run.num_workers == int(workers)
    assert run.desired_members == desired


def test_the_node_script_reports_missing_arguments_and_variables(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    named = {"SHOAL_TLS": str(tmp_path), "SHOAL_HEAD": "localhost"}
    for arguments, also, message in (
        ([], named, "usage: node.sh cluster"),
        (["worker"], named, "usage: node.sh worker SCRIPT"),
        (["cluster"], {}, "SHOAL_TLS: the folder of the certificates"),
    ):
        done = subprocess.run(
            ["bash", SCRIPT, *arguments],
            env={**given, **also},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0 and message in done.stderr
