"""The snapshots of one job at one URL.

    URL/JOB/manifests/000000007-CUT.json                    written last
    URL/JOB/parts/000000007-CUT/shard-00012.safetensors     written before the manifest
    URL/JOB/parts/000000007-CUT/manifest.json               the manifest until it is published

A bucket may carry out a request after the client has given up on it. So the manifest is published
from a draft, which is removed before any other file of the snapshot. Every call blocks, and may
raise AccessDenied.
"""

from collections.abc import Mapping, Sequence

import structlog

from shoal_proto.errors import InvalidSpec, SnapshotDamaged, SnapshotFailed, UnknownSnapshot
from shoal_proto.names import NAME_RULE, is_name
from shoal_server.snapshots.manifest import Manifest, ManifestEntry, check_part_file, folder_of
from shoal_server.snapshots.storage import Storage

log = structlog.get_logger(__name__)

MANIFESTS = "manifests"
PARTS = "parts"
DRAFT = "manifest.json"


class SnapshotLibrary:
    def __init__(self, storage: Storage, job: str) -> None:
        """Raises InvalidSpec for a bad name of a job."""
        if not is_name(job):
            raise InvalidSpec("bad name of a job", seen=repr(job), expected=NAME_RULE)
        self.storage = storage
        self.job = job

    def list(self) -> Sequence[Manifest]:
        """List the complete snapshots, oldest first, without damaged ones. Raises Unavailable."""
        return self.read_all()[0]

    def read_all(self) -> tuple[Sequence[Manifest], Mapping[int, SnapshotDamaged]]:
        """Read the complete snapshots, oldest first, and the errors of damaged manifests by number.
        Raises Unavailable."""
        manifests: list[Manifest] = []
        damaged: dict[int, SnapshotDamaged] = {}
        for path in self._manifest_paths():
            try:
                manifest = self._read(path)
            except SnapshotDamaged as error:
                log.error("snapshot_left_out", job=self.job, reason=str(error))
                damaged[_number_in(path)] = error
                continue
            if manifest is not None:
                manifests.append(manifest)
        return sorted(manifests, key=lambda each: (each.number, each.taken_unix_s)), damaged

    def newest(self) -> Manifest | None:
        """Newest undamaged snapshot; None if there is none. Raises Unavailable."""
        manifests = self.list()
        return manifests[-1] if manifests else None

    def next_number(self) -> int:
        """Number above those of all snapshots, damaged ones included. Raises Unavailable."""
        return 1 + max(map(_number_in, self._manifest_paths()), default=0)

    def find(self, number: int = 0, cut_id: str = "") -> Manifest:
        """Snapshot with `number`; 0: the newest undamaged one. Clusters that share the storage may
        have snapshots of one number: `cut_id` tells them apart, without it the last one is chosen.
        Raises SnapshotDamaged, UnknownSnapshot, Unavailable."""
        manifests, damaged = self.read_all()
        chosen = [
            each for each in manifests if number in (0, each.number) and cut_id in ("", each.cut_id)
        ]
        if chosen:
            return chosen[-1]
        numbers = ", ".join(str(each.number) for each in manifests)
        worst = damaged.get(number or max(damaged, default=0))
        if worst is not None:
            raise worst
        raise UnknownSnapshot(
            f"there is no such snapshot of job {self.job} at {self.storage.url}",
            seen=f"number {number}" if number else "none at all",
            expected=f"one of {numbers}" if numbers else "a snapshot that was completed",
            fix=f"See `shoal snapshots {self.job}`.",
        )

    def read_part(self, part: ManifestEntry) -> bytes:
        """Contents of one shard's file, not checked. Raises SnapshotDamaged if the file is missing
        or badly named; Unavailable."""
        check_part_file(part)
        data = self.storage.read(f"{self.job}/{part.file}")
        if data is None:
            raise SnapshotDamaged(
                f"the file of shard {part.shard_id} is gone",
                seen=f"no {part.file}",
                expected=f"{part.num_bytes} bytes",
                fix="Restore another snapshot.",
                details={"file": part.file, "shard": str(part.shard_id)},
            )
        return data

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a snapshot. Raises SnapshotFailed if a file is missing, badly
        named, or of another size; Unavailable, after which the manifest may have been written."""
        for part in manifest.parts:
            _check_reported(part)
        folders = {part.file.rpartition("/")[0] for part in manifest.parts}
        sizes: dict[str, int] = {}
        for folder in sorted(folders):
            sizes |= self.storage.sizes(f"{self.job}/{folder}")
        for part in manifest.parts:
            seen = sizes.get(f"{self.job}/{part.file}")
            if seen != part.num_bytes:
                raise SnapshotFailed(
                    f"the file of shard {part.shard_id} is not as it was reported",
                    seen="no file" if seen is None else f"{seen} bytes",
                    expected=f"{part.num_bytes} bytes in {part.file}",
                )
        draft, path = self._manifest_paths_of(manifest.number, manifest.cut_id)
        self.storage.write(draft, manifest.to_bytes())
        self.storage.publish(draft, path)

    def discard(self, number: int, cut_id: str) -> None:
        """Remove all files of a snapshot that failed. Raises Unavailable; then the snapshot is
        whole, or has no manifest."""
        # First, so that the manifest never names a missing file.
        self.storage.remove(self._manifest_paths_of(number, cut_id))
        self._remove_folder(folder_of(number, cut_id))

    def keep_newest(self, num_kept: int | None) -> Sequence[Manifest]:
        """Remove all snapshots but the newest `num_kept`, and every file to which no remaining
        snapshot refers; return the removed snapshots. `num_kept`: 1 or more; None: all snapshots.

        A snapshot later than the newest complete one stays, as it may be in progress. A damaged
        manifest stays, with all files of its own snapshot and of earlier ones, to which it may
        refer. Raises InvalidSpec for another `num_kept`; Unavailable, then only some may be
        removed.
        """
        if num_kept is not None and num_kept < 1:
            raise InvalidSpec(
                "bad number of snapshots to keep", seen=str(num_kept), expected="1 or more"
            )
        manifests, damaged = self.read_all()
        kept = manifests if num_kept is None else manifests[-num_kept:]
        removed = manifests[: len(manifests) - len(kept)]
        # First, so that no manifest ever names a missing file.
        for each in removed:
            self.storage.remove(self._manifest_paths_of(each.number, each.cut_id))
        if not kept:
            return removed
        needed = {part.file for each in kept for part in each.parts}
        last_unreadable = max(damaged, default=0)
        for name in self.storage.folders(f"{self.job}/{PARTS}"):
            number = name.partition("-")[0]
            if number.isdigit() and last_unreadable < int(number) <= kept[-1].number:
                self._remove_folder(f"{PARTS}/{name}", needed)
        return removed

    def _remove_folder(self, folder: str, needed: set[str] | None = None) -> None:
        start = len(self.job) + 1
        files = self.storage.sizes(f"{self.job}/{folder}")
        self.storage.remove(path for path in files if path[start:] not in (needed or ()))

    def _read(self, path: str) -> Manifest | None:
        data = self.storage.read(path)
        if data is None:
            # Another coordinator has just removed it.
            return None
        manifest = Manifest.from_bytes(data, path)
        if manifest.job != self.job or manifest.number != _number_in(path):
            raise SnapshotDamaged(
                f"the manifest {path} is of another snapshot",
                seen=f"number {manifest.number} of job {manifest.job}",
                expected=f"number {_number_in(path)} of job {self.job}",
                fix="Restore another snapshot.",
                details={"file": path},
            )
        return manifest

    def _manifest_paths(self) -> Sequence[str]:
        found = self.storage.sizes(f"{self.job}/{MANIFESTS}")
        return [path for path in found if path.endswith(".json") and _number_in(path)]

    def _manifest_paths_of(self, number: int, cut_id: str) -> tuple[str, str]:
        draft = f"{self.job}/{folder_of(number, cut_id)}/{DRAFT}"
        return draft, f"{self.job}/{MANIFESTS}/{number:09d}-{cut_id}.json"


def _number_in(path: str) -> int:
    """Number in a path; 0 if the name is not a manifest's."""
    digits = path.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else 0


def _check_reported(part: ManifestEntry) -> None:
    try:
        check_part_file(part)
    except SnapshotDamaged as error:
        raise SnapshotFailed(
            f"the file of shard {part.shard_id} is not as it was reported",
            seen=error.seen,
            expected=error.expected,
        ) from error
