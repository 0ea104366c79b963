"""Files of servers cannot be read or written by other users of the machine."""

import os
import stat
from pathlib import Path

import grpc
import pytest
from fuzzing.cluster import FuzzedCluster

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.v1.snapshots_pb2 import TakeSnapshotRequest
from shoal_proto.v1.snapshots_pb2_grpc import SnapshotsStub


def open_to_others(directory: Path) -> list[str]:
    """Return the files that other users may access, with their modes."""
    modes = {path: path.lstat().st_mode for path in directory.rglob("*")}
    return [
        f"{stat.filemode(mode)} {path.relative_to(directory)}"
        for path, mode in modes.items()
        if stat.S_ISREG(mode) and mode & 0o077
    ]


@pytest.mark.long
def test_journals_and_snapshots_are_private(tmp_path: Path) -> None:
    """The servers are started with a umask that would let others read."""
    before = os.umask(0o022)
    try:
        with FuzzedCluster(tmp_path) as cluster:
            with grpc.insecure_channel(cluster.coordinator.grpc) as channel:
                request = TakeSnapshotRequest(job=cluster.job)
                SnapshotsStub(channel).Take(request, timeout=30.0)
            written = [tmp_path / "journal", tmp_path / "snapshots"]
            assert all(any(path.is_file() for path in each.rglob("*")) for each in written)
            assert [each for place in written for each in open_to_others(place)] == []
    finally:
        os.umask(before)


def test_the_directory_of_a_local_cluster_is_private(tmp_path: Path) -> None:
    """The logs are private as well, even in a directory that existed before and that others may
    enter."""
    before = os.umask(0o022)
    try:
        for place in (tmp_path / "made", tmp_path / "found"):
            if place.name == "found":
                place.mkdir()
            with LocalCluster(LocalClusterConfig(directory=place, num_parameter_servers=0)):
                assert any(place.glob("*.log"))
                assert open_to_others(place) == []
            if place.name == "made":
                assert place.stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)
