"""Local clusters that a command finds by an address, and those that it must not find."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import identity, local_clusters
from shoal_proto.tls.local_clusters import Announcement, LocalClusterRecord, find
from shoal_proto.tls.names import CertificateRole

DEADLINE_S = 60.0
KILLED = """
import os, sys, pathlib
from shoal_proto.tls import local_clusters
from shoal_proto.tls.local_clusters import Announcement, LocalClusterRecord
local_clusters.PARENT = pathlib.Path(sys.argv[1])
Announcement(LocalClusterRecord(addresses=["127.0.0.1:7"], certificates=pathlib.Path("c")))
print("announced", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_clusters, "PARENT", tmp_path)
    monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path))


def record(*addresses: str, certificates: Path = Path("certs")) -> LocalClusterRecord:
    return LocalClusterRecord(addresses=addresses, certificates=certificates)


def test_a_cluster_is_found_by_each_of_its_addresses_until_it_ends(tmp_path: Path) -> None:
    announced = Announcement(record("127.0.0.1:7700", "http://127.0.0.1:7780"))
    assert announced.path.stat().st_mode & 0o777 == 0o600
    for asked in (
        *("127.0.0.1:7700", "localhost:7700", "http://localhost:7780/jobs", "127.0.0.1:7780"),
    ):
        found = find(["10.0.0.1:7700", asked])
        assert found is not None and found.certificates == Path("certs").resolve(), asked
    for asked in ("127.0.0.1:7701", "10.0.0.1:7700", "7700", "host:7700", "", "[::1]:7700", "//["):
        assert find([asked]) is None, asked
    announced.close()
    assert find(["127.0.0.1:7700"]) is None
    assert list(announced.path.parent.iterdir()) == []


def test_the_record_of_a_killed_cluster_is_ignored(tmp_path: Path) -> None:
    """The record of a killed cluster is ignored before the next cluster starts, and removed by that
    start."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (killed.stdout, killed.returncode) == (b"announced\n", -signal.SIGKILL)
    (left,) = tmp_path.glob("shoal-clusters-*/*.json")
    assert find(["127.0.0.1:7"]) is None
    announced = Announcement(record("127.0.0.1:8"))
    assert not left.exists()
    announced.close()


def test_records_that_another_user_could_have_written_are_ignored(tmp_path: Path) -> None:
    """A record is ignored, and none is written, if others may write to its folder or the folder is
    a symbolic link."""
    announced = Announcement(record("127.0.0.1:7700"))
    folder = announced.path.parent
    folder.chmod(0o770)
    assert find(["127.0.0.1:7700"]) is None
    with pytest.raises(InvalidSpec, match="not private"):
        Announcement(record("127.0.0.1:7701"))
    folder.chmod(0o700)
    assert find(["127.0.0.1:7700"]) is not None
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert find(["127.0.0.1:7700"]) is None
    with pytest.raises(InvalidSpec, match="not private"):
        Announcement(record("127.0.0.1:7701"))


def test_tmpdir_does_not_decide_where_a_record_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR counts only if the usual folder belongs to another user or cannot be written to."""
    announced = Announcement(record("127.0.0.1:7700"))
    for directory in ("scheduler", "absent"):
        monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path / directory))
        assert find(["127.0.0.1:7700"]) is not None
    announced.close()

    (tmp_path / "own").mkdir()
    monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path / "own"))
    announced.path.parent.chmod(0o755)
    for parent in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(local_clusters, "PARENT", parent)
        announced = Announcement(record("127.0.0.1:7701"))
        assert announced.path.parent.parent == tmp_path / "own"
        assert find(["127.0.0.1:7701"]) is not None
        announced.close()


def test_a_machine_without_a_writable_folder_has_no_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's root may be read-only."""
    monkeypatch.setattr(local_clusters, "PARENT", tmp_path / "absent")
    monkeypatch.setattr(local_clusters.tempfile, "tempdir", None)
    monkeypatch.setattr(local_clusters.tempfile, "_candidate_tempdir_list", list)
    assert find(["127.0.0.1:7700"]) is None


def test_clusters_of_another_network_are_not_found() -> None:
    """127.0.0.1:7700 in a container is another address than on its host."""
    announced = Announcement(record("127.0.0.1:7700"))
    written = json.loads(announced.path.read_text())
    announced.path.write_text(json.dumps({**written, "network": written["network"] + 1}))
    assert find(["127.0.0.1:7700"]) is None
    announced.close()


def test_a_broken_record_is_ignored(tmp_path: Path) -> None:
    announced = Announcement(record("127.0.0.1:7700"))
    other = Announcement(record("127.0.0.1:7701"))
    for broken in ("{", "[]", "{}"):
        announced.path.write_text(broken)
        assert find(["127.0.0.1:7700"]) is None
    assert find(["127.0.0.1:7701"]) is not None
    announced.close()
    other.close()


def test_files_in_the_environment_come_before_those_of_a_local_cluster(tmp_path: Path) -> None:
    for folder in ("given", "found"):
        (tmp_path / folder).mkdir()
        for name in ("ca.crt", "worker.crt", "worker.key", "viewer.crt", "viewer.key"):
            (tmp_path / folder / name).touch()
    announced = Announcement(record("127.0.0.1:7700", certificates=tmp_path / "found"))
    asked = ["127.0.0.1:7700"]
    files = identity.from_environment({}, asked)
    assert files is not None and files.cert == tmp_path / "found" / "worker.crt"
    files = identity.from_environment({"SHOAL_TLS": str(tmp_path / "given")}, asked)
    assert files is not None and files.cert == tmp_path / "given" / "worker.crt"
    assert identity.from_environment({}, ["127.0.0.1:1"]) is None
    files = identity.files_at(asked, CertificateRole.OPERATOR, CertificateRole.VIEWER)
    assert files is not None and files.cert == tmp_path / "found" / "viewer.crt"
    announced.close()
