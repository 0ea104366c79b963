"""Local clusters: the ones of this user that a command finds by an address, and the ones that it
must not."""

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
local_clusters._PARENT = pathlib.Path(sys.argv[1])
Announcement(LocalClusterRecord(addresses=["127.0.0.1:7"], certificates=pathlib.Path("c")))
print("announced", flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_clusters, "_PARENT", tmp_path)
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


def test_what_a_killed_cluster_left_counts_for_nothing(tmp_path: Path) -> None:
    """A command ignores the record even before the next cluster starts, which removes it."""
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


def test_what_another_user_could_have_laid_is_not_believed(tmp_path: Path) -> None:
    """Folders to be refused: one that others may write to, a link, and one of another user."""
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


def test_a_directory_for_temporary_files_of_its_own_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR of the cluster or of a command does not decide the record's location, unless the usual
    folder belongs to another user or cannot be written to."""
    announced = Announcement(record("127.0.0.1:7700"))
    for directory in ("scheduler", "absent"):
        monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path / directory))
        assert find(["127.0.0.1:7700"]) is not None
    announced.close()

    (tmp_path / "own").mkdir()
    monkeypatch.setattr(local_clusters.tempfile, "tempdir", str(tmp_path / "own"))
    announced.path.parent.chmod(0o755)
    for parent in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(local_clusters, "_PARENT", parent)
        announced = Announcement(record("127.0.0.1:7701"))
        assert announced.path.parent.parent == tmp_path / "own"
        assert find(["127.0.0.1:7701"]) is not None
        announced.close()


def test_another_network_has_other_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address 127.0.0.1:7700 in a container is not that of its host, even if both share a
    directory."""
    announced = Announcement(record("127.0.0.1:7700"))
    monkeypatch.setattr(local_clusters, "_network", lambda: -1)
    assert find(["127.0.0.1:7700"]) is None
    announced.close()


def test_a_broken_record_costs_no_command(tmp_path: Path) -> None:
    announced = Announcement(record("127.0.0.1:7700"))
    other = Announcement(record("127.0.0.1:7701"))
    for broken in ("{", "[]", "{}"):
        announced.path.write_text(broken)
        assert find(["127.0.0.1:7700"]) is None
    assert find(["127.0.0.1:7701"]) is not None
    announced.close()
    other.close()


def test_what_is_given_comes_before_what_is_found(tmp_path: Path) -> None:
    """Files named in the environment come first, then those of a local cluster at a coordinator's
    address."""
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
