"""Storage: files are read as they were written, on every kind of it, and never in part."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_proto.errors import InvalidSpec, Unavailable
from shoal_server.snapshots.storage import Storage


@pytest.fixture(params=["directory", "file-url", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    urls = {
        "directory": str(tmp_path / "store"),
        "file-url": (tmp_path / "store").as_uri(),
        "memory": f"memory://{tmp_path.name}/store",
    }
    yield Storage(urls[request.param])


def test_a_file_is_read_as_it_was_written(storage: Storage) -> None:
    storage.write("job/parts/one/a.bin", b"\x00\x01" * 1000)
    storage.write("job/parts/one/a.bin", b"anew")
    assert storage.read("job/parts/one/a.bin") == b"anew"
    assert storage.read("job/parts/one/b.bin") is None
    assert storage.read("nowhere/at/all") is None


def test_a_file_of_pieces_is_whole_or_absent(storage: Storage) -> None:
    """The name of the file is computed once all pieces are written."""
    taken = []

    def pieces(count: int) -> Iterator[bytes]:
        for number in range(count):
            taken.append(number)
            yield bytes([number]) * 1000
        if count > 3:
            raise InvalidSpec("spoilt", seen="no more", expected="more")

    storage.write_pieces("job/one", lambda: f"of-{len(taken)}", pieces(3))
    assert storage.read("job/one/of-3") == b"".join(bytes([n]) * 1000 for n in range(3))
    with pytest.raises(InvalidSpec, match="spoilt"):
        storage.write_pieces("job/one", lambda: "spoilt", pieces(4))
    assert storage.sizes("job") == {"job/one/of-3": 3000}


def test_a_local_file_is_durable_with_its_new_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder above each new folder is synced too: without that, the new folder may be gone
    after a power loss, with all that is in it."""
    synchronized, fsync = set[Path](), os.fsync

    def note(descriptor: int) -> None:
        synchronized.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    Storage(str(tmp_path / "store")).write("job/one/a", b"1")
    folders = [tmp_path, *(tmp_path / below for below in ("store", "store/job", "store/job/one"))]
    assert set(folders) < synchronized


def test_files_are_listed_with_their_sizes(storage: Storage) -> None:
    assert storage.sizes("job") == {} and storage.folders("job") == []
    storage.write("job/one/a", b"12345")
    storage.write("job/two/b", b"")
    storage.write("jobless/one/a", b"1")
    assert storage.sizes("job") == {"job/one/a": 5, "job/two/b": 0}
    assert storage.folders("job") == ["one", "two"]


def test_empty_folders_of_removed_files_are_removed(storage: Storage) -> None:
    storage.write("job/one/a", b"1")
    storage.write("job/one/b", b"2")
    storage.remove(["job/one/a", "job/one/never"])
    assert storage.folders("job") == ["one"]
    storage.remove(["job/one/b"])
    assert storage.sizes("job") == {} and storage.folders("job") == []


def test_a_reader_of_a_local_file_never_sees_a_part_of_a_write(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    written = [bytes([value]) * 100_000 for value in range(3)]
    storage.write("file", written[0])
    torn: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen = storage.read("file")
            if seen not in written:
                torn.append(seen or b"")

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for data in written:
            storage.write("file", data)
    done.set()
    reader.join()
    assert torn == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_error_for_an_unwritable_directory_has_its_path(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the directory should be")
    storage = Storage(str(tmp_path / "store"))
    with pytest.raises(Unavailable, match=r"store/job/a cannot be written"):
        storage.write("job/a", b"1")


@pytest.mark.parametrize("url", ["nothing://at/all", "/", "file:///", ""])
def test_an_unsupported_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidSpec):
        Storage(url)
