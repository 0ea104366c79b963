"""Durable pushes: they are on disk if every server dies, and the shards are led from there."""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clusters.one_tensor import OneTensor
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.processes.served_process import awaited

from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import InvalidSpec, StateLost
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import Acknowledgement
from shoal_server.etcd import keys
from shoal_server.parameters.journal.config import JournalConfig

MODEL = OneTensor(600_000)
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0, momentum=0.5)])
LIMIT_S, PATIENCE_S = 30.0, 1.5
DURABLE = Acknowledgement.ACKNOWLEDGEMENT_DURABLE


servers = servers_fixture(0)


def start(servers: ParameterServers, folder: Path, *names: str) -> None:
    for name in names:
        servers.add(name, journal=JournalConfig(directory=folder / name), lease_ttl_s=0.5)


def connect(
    servers: ParameterServers,
    token: Token,
    level: Acknowledgement.ValueType = DURABLE,
    *,
    timeout_s: float = 30.0,
) -> ParameterClient:
    return ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=timeout_s, acknowledgement=level
    )


def trained(servers: ParameterServers, token: Token) -> ParameterClient:
    return MODEL.create(connect(servers, token), MOMENTUM)


@pytest.mark.sampled()
@pytest.mark.parametrize("names", [("ps-0",), ("ps-0", "ps-1")], ids=["one", "two"])
def test_pushes_survive_the_end_of_all_servers(
    servers: ParameterServers, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Values, momentum and sessions are recovered from the journals."""
    start(servers, tmp_path, *names)
    token = servers.admit("w0")
    client = trained(servers, token)
    for _ in range(3):
        client.push(MODEL.filled(-1.0))
    for name in names:
        servers.stop(name)
    start(servers, tmp_path, *names)
    values = MODEL.filled(9.0)
    client.push(MODEL.filled(-1.0), into=values)
    # 1, 1.5, 1.75 and 1.875 for gradients of -1 under momentum 0.5.
    assert set(values["w"].cast("f")) == {6.125}
    again = connect(servers, token)
    again.fetch_map()
    assert again.push(MODEL.filled(-1.0)).duplicates == len(again.fetch_map().shards)
    client.close()
    again.close()


def test_a_shard_stays_with_a_continuing_backup(servers: ParameterServers, tmp_path: Path) -> None:
    """The journal of the server that was away is outdated, and is not led from."""
    start(servers, tmp_path, "ps-0", "ps-1")
    client = trained(servers, servers.admit("w0"))
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    client.push(MODEL.filled(-1.0))
    start(servers, tmp_path, "ps-0")
    values = MODEL.filled(9.0)
    client.push(MODEL.filled(-1.0), into=values)
    assert set(values["w"].cast("f")) == {4.25}
    client.close()


@pytest.mark.long
def test_an_older_copy_of_a_journal_is_an_error(servers: ParameterServers, tmp_path: Path) -> None:
    """An operator may have put it back. The error has both versions; with the newest copy, training
    continues."""
    folder = tmp_path / "ps-0"
    start(servers, tmp_path, "ps-0")
    client = trained(servers, servers.admit("w0"))
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    shutil.copytree(folder, tmp_path / "older")
    start(servers, tmp_path, "ps-0")
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    folder.rename(tmp_path / "newest")
    (tmp_path / "older").rename(folder)
    start(servers, tmp_path, "ps-0")
    with pytest.raises(StateLost, match="newest copy of its journal") as lost:
        client.push(MODEL.filled(-1.0))
    assert lost.value.details["found_version"] == "2"
    assert "had reached version 2 of epoch 2 at least" in lost.value.seen
    servers.stop("ps-0")
    shutil.rmtree(folder)
    (tmp_path / "newest").rename(folder)
    start(servers, tmp_path, "ps-0")
    values = MODEL.filled(9.0)
    client.push(MODEL.filled(-1.0), into=values)
    assert set(values["w"].cast("f")) == {4.25}
    client.close()


@pytest.mark.long
def test_a_journal_of_another_run_of_the_job_is_not_led(
    servers: ParameterServers, tmp_path: Path
) -> None:
    """The journal's shards have the same numbers and more updates, as from before a reset of the
    job. Training continues with the server's own journal."""
    folder, own = tmp_path / "ps-0", tmp_path / "own"
    start(servers, tmp_path, "ps-0")
    client = trained(servers, servers.admit("w0"))
    for _ in range(5):
        client.push(MODEL.filled(-1.0))
    client.close()
    servers.stop("ps-0")
    shutil.copytree(folder, tmp_path / "foreign")
    servers.run(servers.store.delete(keys.assignments("job"), prefix=True))
    servers.run(servers.store.delete(keys.shard_map("job"), prefix=True))
    start(servers, tmp_path, "ps-0")
    client = trained(servers, servers.admit("w1"))
    client.push(MODEL.filled(-1.0))
    servers.stop("ps-0")
    folder.rename(own)
    (tmp_path / "foreign").rename(folder)
    start(servers, tmp_path, "ps-0")
    with pytest.raises(StateLost, match="start server ps-0 again with its own journal") as lost:
        client.push(MODEL.filled(-1.0))
    assert "is of another run of the job" in lost.value.seen
    assert "found_version" not in lost.value.details
    servers.stop("ps-0")
    shutil.rmtree(folder)
    own.rename(folder)
    start(servers, tmp_path, "ps-0")
    values = MODEL.filled(9.0)
    client.push(MODEL.filled(-1.0), into=values)
    assert set(values["w"].cast("f")) == {2.5}
    client.close()


def test_without_a_journal_a_durable_push_is_refused(servers: ParameterServers) -> None:
    """The error names the option of the servers."""
    servers.add("ps-0")
    client = trained(servers, servers.admit("w0"))
    with pytest.raises(InvalidSpec, match="--journal"):
        client.push(MODEL.filled(-1.0))
    client.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 32 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system of a given size here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write a file that takes all remaining space, and return its path."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.long
def test_a_durable_push_waits_for_space_on_a_full_disk(
    servers: ParameterServers, small_disk: Path
) -> None:
    """The wait is longer than the worker's timeout of calls. Pushes of another level continue;
    the next process has every acknowledged push, once."""
    start(servers, small_disk, "ps-0")
    trained(servers, servers.admit("w0")).close()
    token, other_token = servers.admit("w1"), servers.admit("w2")
    client = connect(servers, token, timeout_s=PATIENCE_S)
    other = connect(servers, other_token, Acknowledgement.ACKNOWLEDGEMENT_REPLICATED)
    client.fetch_map()
    other.fetch_map()
    client.push(MODEL.filled(-1.0))
    ballast = fill(small_disk)
    with capture_logs() as logs, ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(client.push, MODEL.filled(-1.0))
        awaited(
            lambda: any(line["event"] == "waiting_for_disk_space" for line in logs),
            LIMIT_S,
            "the worker logs that it waits",
        )
        with pytest.raises(TimeoutError):
            pushing.result(2 * PATIENCE_S)
        other.push(MODEL.filled(-1.0))
        ballast.unlink()
        pushing.result(LIMIT_S)
    (reason,) = [line["reason"] for line in logs if line["event"] == "waiting_for_disk_space"]
    assert "No space left on device" in reason and str(small_disk) in reason
    client.push(MODEL.filled(-1.0))
    client.close()
    other.close()
    servers.stop("ps-0")
    start(servers, small_disk, "ps-0")
    values = MODEL.filled(9.0)
    again = connect(servers, servers.admit("w3"))
    again.fetch_map()
    again.pull(values)
    # 1, 1.5, 1.75 and 1.875 for gradients of -1 under momentum 0.5.
    assert set(values["w"].cast("f")) == {6.125}
    again.close()
