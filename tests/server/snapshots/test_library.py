"""The library of snapshots: each is complete or absent, its files are kept, and damage is found."""

from pathlib import Path

import pytest
from support.clusters.snapshot_world import image, manifest_of, write_part, write_snapshot

from shoal_proto.errors import InvalidSpec, SnapshotDamaged, SnapshotFailed, UnknownSnapshot
from shoal_server.parameters.shard import image_file
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest
from shoal_server.snapshots.storage import Storage


@pytest.fixture
def library(tmp_path: Path) -> SnapshotLibrary:
    return SnapshotLibrary(Storage(str(tmp_path)), "job")


def files(library: SnapshotLibrary) -> list[str]:
    return list(library.storage.sizes("job"))


def check_whole(library: SnapshotLibrary, manifest: Manifest) -> None:
    """Check that every shard can be read, and equals the one that was written."""
    for part in manifest.parts:
        read = image_file.from_bytes(
            library.read_part(part), sha256=part.sha256, file=part.file, shard_id=part.shard_id
        )
        written = image(part.shard_id, part.version)
        assert b"".join(image_file.pieces(read)) == b"".join(image_file.pieces(written))


def test_a_manifest_is_read_as_it_was_written(library: SnapshotLibrary) -> None:
    written = write_snapshot(library, 1, [3, 4])
    assert library.list() == [written]
    assert library.newest() == library.find() == library.find(1) == written
    check_whole(library, written)


def test_an_empty_library_has_no_snapshot(library: SnapshotLibrary) -> None:
    assert library.list() == [] and library.newest() is None
    with pytest.raises(UnknownSnapshot):
        library.find()
    write_snapshot(library, 4, [1])
    with pytest.raises(UnknownSnapshot, match="expected one of 4"):
        library.find(3)


def test_files_without_a_manifest_are_no_snapshot(library: SnapshotLibrary) -> None:
    write_snapshot(library, 1, [1, 1])
    write_part(library, image(0, 2), 2, "torn")
    assert [each.number for each in library.list()] == [1]


def test_a_snapshot_with_a_missing_or_short_file_is_not_committed(
    library: SnapshotLibrary, tmp_path: Path
) -> None:
    parts = [write_part(library, image(shard_id), 1, "cut1") for shard_id in range(2)]
    path = tmp_path / "job" / parts[1].file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(SnapshotFailed, match="shard 1"):
        library.commit(manifest_of("job", 1, parts))
    path.unlink()
    with pytest.raises(SnapshotFailed, match="no file"):
        library.commit(manifest_of("job", 1, parts))
    assert library.list() == []


def test_an_unchanged_shard_is_not_written_again(library: SnapshotLibrary) -> None:
    first = write_snapshot(library, 1, [3, 4, 5])
    second = write_snapshot(library, 2, [3, 9, 5], previous=first)
    assert [part.file for part in second.parts][::2] == [part.file for part in first.parts][::2]
    assert second.num_new_bytes == second.parts[1].num_bytes < second.num_bytes
    check_whole(library, second)


def test_retention_keeps_the_files_of_the_kept_snapshots(library: SnapshotLibrary) -> None:
    """Shard 0 never changes: its file is kept after the snapshot for which it was written."""
    newest: Manifest | None = None
    for number in range(1, 7):
        newest = write_snapshot(library, number, [1, number, 100 + number // 3], previous=newest)
        library.keep_newest(2)
    kept = library.list()
    assert [each.number for each in kept] == [5, 6]
    for manifest in kept:
        check_whole(library, manifest)
    needed = {f"job/{part.file}" for each in kept for part in each.parts}
    assert set(files(library)) == needed | {
        f"job/manifests/{number:09d}-cut{number}.json" for number in (5, 6)
    }


@pytest.mark.parametrize("num_kept", [0, -1])
def test_retention_that_would_keep_no_snapshot_is_refused(
    library: SnapshotLibrary, num_kept: int
) -> None:
    for number in (1, 2):
        write_snapshot(library, number, [number])
    with pytest.raises(InvalidSpec, match="1 or more"):
        library.keep_newest(num_kept)
    assert [each.number for each in library.list()] == [1, 2]


def test_retention_keeps_the_files_of_a_snapshot_of_a_later_release(
    library: SnapshotLibrary, tmp_path: Path
) -> None:
    """Shard 0 of that snapshot is in a file of the first one, whose manifest is removed."""
    first = write_snapshot(library, 1, [1, 1])
    second = write_snapshot(library, 2, [1, 2], previous=first)
    path = tmp_path / "job" / "manifests" / "000000002-cut2.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2', 1))
    third = write_snapshot(library, 3, [3, 3])
    assert library.keep_newest(1) == [first]
    assert path.exists()
    check_whole(library, second)
    path.unlink()
    library.keep_newest(1)
    assert library.storage.folders("job/parts") == ["000000003-cut3"]
    check_whole(library, third)


def test_files_of_a_failed_snapshot_are_removed_with_later_retention(
    library: SnapshotLibrary,
) -> None:
    write_part(library, image(0), 1, "torn")
    write_part(library, image(0), 3, "running")
    written = write_snapshot(library, 2, [1])
    library.keep_newest(5)
    assert library.storage.folders("job/parts") == ["000000002-cut2", "000000003-running"]
    library.discard(3, "running")
    assert library.storage.folders("job/parts") == ["000000002-cut2"]
    check_whole(library, written)


def test_a_manifest_cut_anywhere_is_not_listed(library: SnapshotLibrary, tmp_path: Path) -> None:
    first = write_snapshot(library, 1, [1])
    write_snapshot(library, 2, [2])
    path = tmp_path / "job" / "manifests" / "000000002-cut2.json"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert library.list() == [first]


def test_there_is_no_newest_snapshot_if_every_manifest_is_damaged(
    library: SnapshotLibrary, tmp_path: Path
) -> None:
    write_snapshot(library, 1, [1])
    (tmp_path / "job" / "manifests" / "000000001-cut1.json").write_bytes(b"{")
    assert library.newest() is None


def test_a_changed_byte_in_a_manifest_is_found(library: SnapshotLibrary, tmp_path: Path) -> None:
    manifest = write_snapshot(library, 1, [1])
    data = manifest.to_bytes()
    at = data.index(b'"version": 1')
    changed = data[:at] + b'"version": 2' + data[at + 12 :]
    with pytest.raises(SnapshotDamaged, match="SHA-256") as raised:
        Manifest.from_bytes(changed, "manifests/1.json")
    assert raised.value.details == {"file": "manifests/1.json"}


def test_the_error_for_a_missing_file_names_file_and_shard(
    library: SnapshotLibrary, tmp_path: Path
) -> None:
    manifest = write_snapshot(library, 1, [1, 2])
    (tmp_path / "job" / manifest.parts[1].file).unlink()
    with pytest.raises(SnapshotDamaged, match="shard 1 is gone") as raised:
        library.read_part(manifest.parts[1])
    assert raised.value.details == {"file": manifest.parts[1].file, "shard": "1"}


def test_jobs_do_not_see_each_other(library: SnapshotLibrary) -> None:
    write_snapshot(library, 1, [1])
    other = SnapshotLibrary(library.storage, "jo")
    assert other.list() == []
    with pytest.raises(InvalidSpec):
        SnapshotLibrary(library.storage, "../job")
