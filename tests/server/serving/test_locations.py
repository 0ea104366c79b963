"""Locations and manifests of snapshots: only locations below an operator's roots are accepted, and
a damaged or forged manifest is an error."""

from pathlib import Path

import pytest
from support.clusters.snapshot_world import image, manifest_of, write_part, write_snapshot

from shoal_proto.errors import AccessDenied, InvalidSpec, SnapshotDamaged, SnapshotFailed
from shoal_server.serving.locations import AllowedRoots, Location
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import ManifestEntry
from shoal_server.snapshots.storage import Storage

TEMPLATE = "reference::data:application/json;base64,eyJ2ZXJzaW9uIjoxLCJyZWZzIjp7fX0="


@pytest.mark.parametrize(
    "url",
    [
        TEMPLATE,
        "reference://x",
        "simplecache::file:///tmp/x",
        "zip://a::s3://bucket/a.zip",
        "http://127.0.0.1:80/x",
        "github://owner:repo@main/x",
        "data:text/plain,x",
        "ssh://host/x",
        "LOCAL:///tmp/x",
        "s3://bucket/../other",
        "s3://bucket//x",
        "s3://bucket/a?versionId=1",
        "s3://",
        "/tmp/../etc",
        "file:///tmp/./x",
        "file://host/tmp/x",
        "tmp/x",
        "~/x",
        "/tmp/x\0y",
        "/",
        "file:///",
        "",
    ],
)
def test_other_kinds_of_urls_and_paths_are_refused(url: str) -> None:
    """Only absolute paths, file:// and buckets (s3, gs, az ...) are accepted, without `..`, empty
    names, queries or chained schemes."""
    with pytest.raises(InvalidSpec, match="that is not a location for snapshots"):
        Storage(url)


@pytest.mark.parametrize(
    ("root", "url", "is_below"),
    [
        ("s3://bucket/a", "s3://bucket/a", True),
        ("s3://bucket/a/", "s3a://bucket/a/b", True),
        ("s3://bucket/a", "s3://bucket/ab", False),
        ("s3://bucket/a", "s3://other/a", False),
        ("s3://bucket/a", "gs://bucket/a", False),
        ("gs://bucket", "gcs://bucket/x", True),
        ("az://box/a", "abfs://box/a/b", True),
        ("az://box/a", "abfs://box@evil.example.com/a/b", False),
    ],
)
def test_a_location_in_a_bucket_must_be_below_a_root(root: str, url: str, is_below: bool) -> None:
    roots = AllowedRoots([root])
    if is_below:
        assert roots.locate(url).path.startswith(Location.parse(root).path)
        return
    with pytest.raises(AccessDenied) as raised:
        roots.locate(url)
    assert raised.value.seen == url and root in raised.value.expected


def test_a_link_out_of_a_root_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    roots = AllowedRoots([str(root)])
    assert roots.locate(f"file://{root}/job").path == f"{root}/job"
    for url in (f"{root}/link", f"{root}/link/job", str(outside), f"{root}side"):
        with pytest.raises(AccessDenied):
            roots.locate(url)
    # A root may itself be a link: the operator made it.
    (tmp_path / "shared").symlink_to(root)
    assert (
        AllowedRoots([str(tmp_path / "shared")]).locate(f"{tmp_path}/shared/job").path
        == f"{root}/job"
    )


def test_a_link_in_an_open_storage_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    storage = Storage(str(root))
    storage.write("job/parts/a", b"1")
    (root / "job" / "out").symlink_to(outside)
    (root / "job" / "parts" / "b").symlink_to(outside / "secret")
    for path in ("job/out/secret", "job/parts/b", "job/../../outside/secret"):
        with pytest.raises(AccessDenied):
            storage.read(path)
        with pytest.raises(AccessDenied):
            storage.write(path, b"2")
        with pytest.raises(AccessDenied):
            storage.remove([path])
    for folder in ("job/out", "job/../../outside"):
        with pytest.raises(AccessDenied):
            storage.sizes(folder)
        with pytest.raises(AccessDenied):
            storage.folders(folder)
    assert (outside / "secret").read_bytes() == b"secret"


def test_without_roots_every_location_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="--snapshot-root"):
        AllowedRoots([]).locate(str(tmp_path))


def _part(file: str) -> ManifestEntry:
    return ManifestEntry(
        shard_id=0, epoch=1, version=1, kind="dense", file=file, num_bytes=1, sha256="0" * 64
    )


@pytest.mark.parametrize(
    "file",
    [
        "../../../../etc/shadow",
        "parts/../../secret/shard-00000.safetensors",
        "parts/000000001-cut1/../../../x/shard-00000.safetensors",
        "/etc/shadow",
        "manifests/000000001-cut1.json",
        "",
    ],
)
def test_a_manifest_that_names_another_file_is_damaged(tmp_path: Path, file: str) -> None:
    """A part's file outside the folders of parts is not read, and a manifest that names such a file
    is not committed."""
    library = SnapshotLibrary(Storage(str(tmp_path / "root")), "job")
    with pytest.raises(SnapshotDamaged, match="names a file"):
        library.read_part(_part(file))
    with pytest.raises(SnapshotFailed):
        library.commit(manifest_of("job", 1, [_part(file)]))
    # As an attacker with write access would write it, with a correct checksum.
    manifest = manifest_of("job", 1, [_part(file)])
    library.storage.write("job/manifests/000000001-cut1.json", manifest.to_bytes())
    with pytest.raises(SnapshotDamaged):
        library.find(1)


def test_a_damaged_manifest_is_an_error_until_a_newer_one(tmp_path: Path) -> None:
    library = SnapshotLibrary(Storage(str(tmp_path)), "job")
    write_snapshot(library, 1, [1])
    path = tmp_path / "job" / "manifests" / "000000001-cut1.json"
    path.write_bytes(path.read_bytes()[:-10])
    for number in (0, 1):
        with pytest.raises(SnapshotDamaged, match="000000001-cut1"):
            library.find(number)
    second = write_snapshot(library, 2, [2])
    assert library.find() == library.find(2) == second
    with pytest.raises(SnapshotDamaged):
        library.find(1)


@pytest.mark.parametrize(
    "data", [b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe", b'{"format":1,"snapshot":[]}']
)
def test_a_manifest_with_invalid_content_is_damaged(tmp_path: Path, data: bytes) -> None:
    """Invalid content of a manifest's file raises no other error than SnapshotDamaged."""
    library = SnapshotLibrary(Storage(str(tmp_path)), "job")
    library.storage.write("job/manifests/000000003-x.json", data)
    assert library.list() == []
    with pytest.raises(SnapshotDamaged):
        library.find(3)


@pytest.mark.parametrize(
    "change",
    [
        {"number": "3"},
        {"number": True},
        {"taken_unix_s": None},
        {"job": "another"},
        {"parts": []},
        {"steps": [1]},
        {"cursor": 7},
        {"cut_id": "../x"},
    ],
)
def test_a_manifest_with_an_invalid_field_is_damaged(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """Holds even if the manifest's checksum is correct."""
    library = SnapshotLibrary(Storage(str(tmp_path)), "job")
    part = write_part(library, image(0), 3, "cut3")
    manifest = manifest_of("job", 3, [part])
    for key, value in change.items():
        object.__setattr__(manifest, key, value)
    library.storage.write("job/manifests/000000003-cut3.json", manifest.to_bytes())
    assert library.list() == []
    with pytest.raises(SnapshotDamaged):
        library.find(3)
