"""Segments on disk: they are whole or absent, verified when they are read, and private."""

import errno
import os
import stat
from pathlib import Path

import pytest
from support.weights.segments import segment_of

from shoal_server.parameters.weights.disk import WeightDisk

SERIES = "job/policy"


def test_the_next_process_reads_a_segment(tmp_path: Path) -> None:
    segment = segment_of(os.urandom(20_000_000))
    WeightDisk(tmp_path / "weights").write(SERIES, segment)
    disk = WeightDisk(tmp_path / "weights")
    assert disk.holds(SERIES, segment.digest)
    assert disk.all() == [(SERIES, segment.digest)]
    found = disk.read(SERIES, segment.digest)
    assert found is not None
    assert found.view() == segment.view()
    disk.remove(SERIES, segment.digest)
    assert disk.read(SERIES, segment.digest) is None
    assert WeightDisk(tmp_path / "weights").all() == []


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    disk, segment = WeightDisk(tmp_path), segment_of(b"weights")
    disk.write(SERIES, segment)
    (path,) = tmp_path.glob("*/*/*")
    path.rename(path.with_name(path.name + ".draft"))
    assert WeightDisk(tmp_path).all() == []
    assert list(tmp_path.glob("*/*/*")) == []


@pytest.mark.parametrize("name", ["x" * 32, "AB" * 16, "ab " * 10 + "ab"])
def test_a_file_with_another_name_than_a_digest_is_ignored(tmp_path: Path, name: str) -> None:
    """The server starts in spite of such a file, and leaves it as it is."""
    disk, segment = WeightDisk(tmp_path), segment_of(b"weights")
    disk.write(SERIES, segment)
    stray = tmp_path / SERIES / name
    stray.write_bytes(b"stray")
    assert WeightDisk(tmp_path).all() == [(SERIES, segment.digest)]
    assert stray.exists()


@pytest.mark.parametrize("damage", ["changed", "shorter", "longer", "empty"])
def test_a_damaged_file_is_removed_and_not_served(tmp_path: Path, damage: str) -> None:
    disk, segment = WeightDisk(tmp_path), segment_of(b"weights")
    disk.write(SERIES, segment)
    (path,) = tmp_path.glob("*/*/*")
    damaged = {"changed": b"wEights", "shorter": b"weight", "longer": b"weights!", "empty": b""}
    path.write_bytes(damaged[damage])
    assert disk.read(SERIES, segment.digest) is None
    assert not disk.holds(SERIES, segment.digest)
    assert not path.exists()


def test_other_users_cannot_read_segments(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        WeightDisk(tmp_path / "weights").write(SERIES, segment_of(b"weights"))
    finally:
        os.umask(before)
    found = list((tmp_path / "weights").rglob("*"))
    assert len(found) == 3
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in found)


def test_a_durable_segment_has_durable_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder above a new folder is synced too: without that, the new folder and its content may
    be lost with the power."""
    synchronized, fsync = set[Path](), os.fsync

    def note(descriptor: int) -> None:
        synchronized.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    WeightDisk(tmp_path).write(SERIES, segment_of(b"weights"))
    assert {tmp_path, tmp_path / "job", tmp_path / "job" / "policy"} < synchronized


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    disk, segment = WeightDisk(tmp_path), segment_of(b"weights")
    (tmp_path / "job").write_text("in the way")
    with pytest.raises(OSError, match="job"):
        disk.write(SERIES, segment)
    assert not disk.holds(SERIES, segment.digest)


@pytest.mark.parametrize(
    ("number", "is_held"), [(errno.EIO, False), (errno.EMFILE, True)], ids=["EIO", "EMFILE"]
)
def test_a_segment_that_the_disk_cannot_read_is_not_held(
    number: int, is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count as durable, and would not be written again from another server's copy."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    disk, segment = WeightDisk(tmp_path), segment_of(b"weights")
    disk.write(SERIES, segment)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            disk.read(SERIES, segment.digest)
    assert disk.holds(SERIES, segment.digest) == is_held
    disk.write(SERIES, segment)
    assert disk.holds(SERIES, segment.digest)
