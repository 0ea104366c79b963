"""Snapshots on S3 storage, if s3fs and moto's server are installed.

pip install s3fs 'moto[server]'
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import fsspec
import pytest
from support.clusters.snapshot_world import image, write_part, write_snapshot

from shoal_proto.errors import Unavailable
from shoal_server.parameters.shard import image_file
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.storage import Storage

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(**settings).makedirs("shoal-test", exist_ok=True)
    yield "s3://shoal-test/snapshots"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.long
def test_snapshots_are_kept_in_a_bucket(bucket: str) -> None:
    library = SnapshotLibrary(Storage(bucket), "job")
    assert library.list() == [] and library.newest() is None
    first = write_snapshot(library, 1, [1, 1])
    second = write_snapshot(library, 2, [1, 2], previous=first)
    write_part(library, image(0, 9), 3, "torn")
    # Another library reads the same snapshots.
    assert SnapshotLibrary(Storage(bucket), "job").list() == [first, second]
    assert [each.number for each in library.keep_newest(1)] == [1]
    assert library.list() == [second]
    for part in second.parts:
        data = library.read_part(part)
        read = image_file.from_bytes(
            data, sha256=part.sha256, file=part.file, shard_id=part.shard_id
        )
        assert read.version == part.version
    library.discard(3, "torn")
    kept = {f"job/{part.file}" for part in second.parts}
    assert set(library.storage.sizes("job/parts")) == kept


@pytest.mark.long
def test_a_manifest_that_the_bucket_writes_late_is_no_snapshot(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator gives up on the request that publishes a manifest, and removes the snapshot;
    then the bucket carries the request out."""
    library = SnapshotLibrary(Storage(bucket), "job")
    whole = write_snapshot(library, 1, [1])
    files, late = fsspec.core.url_to_fs(bucket)[0], list[Callable[[], None]]()

    def delayed(done: Callable[..., None]) -> Callable[..., None]:
        def request(*args: Any) -> None:
            if not any("/manifests/" in str(each) for each in args):
                done(*args)
                return
            late.append(lambda: done(*args))
            raise TimeoutError("no answer")

        return request

    with monkeypatch.context() as patch:
        for name in ("pipe_file", "cp_file"):
            patch.setattr(files, name, delayed(getattr(files, name)))
        with pytest.raises(Unavailable, match="no answer"):
            write_snapshot(library, 2, [2])
    assert len(late) == 1
    library.discard(2, "cut2")
    with suppress(OSError):
        late[0]()
    assert library.list() == [whole]
    assert list(library.storage.sizes("job")) == [
        "job/manifests/000000001-cut1.json",
        *(f"job/{part.file}" for part in whole.parts),
    ]


def test_a_write_to_a_missing_bucket_is_an_error(bucket: str) -> None:
    with pytest.raises(Unavailable, match="cannot be written"):
        Storage("s3://nowhere/at/all").write("job/a", b"1")
