"""The snapshots of one job at one URL.

    URL/JOB/manifests/000000007-CUT.json                    there: the snapshot is complete
    URL/JOB/parts/000000007-CUT/shard-00012.safetensors     written before the manifest

A snapshot without a manifest does not exist: what was written of it is removed when a later one
has been completed. Every call blocks; call it from a thread.
"""

from collections.abc import Sequence

import structlog

from shoal_proto.errors import InvalidSpec, SnapshotDamaged, SnapshotFailed, UnknownSnapshot
from shoal_server.core.names import NAME_RULE, is_name
from shoal_server.snapshots.manifest import Manifest, Part, folder_of
from shoal_server.snapshots.storage import Storage

log = structlog.get_logger(__name__)

MANIFESTS = "manifests"
PARTS = "parts"


class Library:
    def __init__(self, storage: Storage, job: str) -> None:
        if not is_name(job):
            raise InvalidSpec("bad name of a job", seen=repr(job), expected=NAME_RULE)
        self.storage = storage
        self.job = job

    def list(self) -> list[Manifest]:
        """Every complete snapshot, oldest first. A manifest that is damaged is left out, and the
        log says so. Raises Unavailable."""
        manifests = []
        for path in self._manifest_paths():
            try:
                manifest = self._read(path)
            except SnapshotDamaged as error:
                log.error("snapshot_left_out", job=self.job, reason=str(error))
                continue
            if manifest is not None:
                manifests.append(manifest)
        return sorted(manifests, key=lambda each: (each.number, each.taken_unix_s))

    def newest(self) -> Manifest | None:
        """The newest complete snapshot. Raises Unavailable."""
        return self.list()[-1] if self._manifest_paths() else None

    def find(self, number: int = 0) -> Manifest:
        """The snapshot of that number; 0: the newest. Raises UnknownSnapshot, Unavailable."""
        manifests = self.list()
        chosen = [each for each in manifests if number in (0, each.number)]
        if not chosen:
            numbers = ", ".join(str(each.number) for each in manifests)
            raise UnknownSnapshot(
                f"there is no such snapshot of job {self.job} at {self.storage.url}",
                seen=f"number {number}" if number else "none at all",
                expected=f"one of {numbers}" if numbers else "a snapshot that was completed",
                fix=f"See `shoal snapshots {self.job}`.",
            )
        return chosen[-1]

    def read_part(self, part: Part) -> bytes:
        """One shard's file, as it was written; `image_file.check` compares it with its checksum.

        Raises SnapshotDamaged if it is gone, Unavailable.
        """
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
        """Make a snapshot exist, once all its files are seen to be there.

        Raises SnapshotFailed if one is not, Unavailable.
        """
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
        self.storage.write(self._manifest_path(manifest), manifest.to_bytes())

    def discard(self, number: int, cut_id: str) -> None:
        """Remove what was written for a snapshot that is not to be. Raises Unavailable."""
        self._remove_folder(folder_of(number, cut_id))

    def keep_newest(self, num_kept: int) -> Sequence[Manifest]:
        """Remove all but the newest snapshots, and every file that none of those refers to.

        Files of a snapshot later than the newest complete one are left: it is being written.
        Gives the snapshots that were removed. Raises Unavailable.
        """
        manifests = self.list()
        kept = manifests[-num_kept:]
        removed = manifests[: len(manifests) - len(kept)]
        # The manifests first: none ever names a file that is gone.
        self.storage.remove(self._manifest_path(each) for each in removed)
        if not kept:
            return removed
        needed = {part.file for each in kept for part in each.parts}
        for name in self.storage.folders(f"{self.job}/{PARTS}"):
            number = name.partition("-")[0]
            if number.isdigit() and int(number) <= kept[-1].number:
                self._remove_folder(f"{PARTS}/{name}", needed)
        return removed

    def _remove_folder(self, folder: str, needed: set[str] | None = None) -> None:
        start = len(self.job) + 1
        files = self.storage.sizes(f"{self.job}/{folder}")
        self.storage.remove(path for path in files if path[start:] not in (needed or ()))

    def _read(self, path: str) -> Manifest | None:
        data = self.storage.read(path)
        # None: another coordinator has just removed it.
        return None if data is None else Manifest.from_bytes(data, path)

    def _manifest_paths(self) -> Sequence[str]:
        found = self.storage.sizes(f"{self.job}/{MANIFESTS}")
        return [path for path in found if path.endswith(".json")]

    def _manifest_path(self, manifest: Manifest) -> str:
        return f"{self.job}/{MANIFESTS}/{manifest.number:09d}-{manifest.cut_id}.json"


__all__ = ["Library"]
