"""Images in a journal's directory, one per shard, in files
`images/JOB/SHARD-EPOCH-VERSION-NUMBER-SHA256.safetensors`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from shoal_proto.errors import JournalDamaged, SnapshotDamaged
from shoal_server.parameters.images.image import Image, LoadedImage
from shoal_server.parameters.shard import image_file
from shoal_server.serving.locations import Location
from shoal_server.snapshots.storage import Storage

log = structlog.get_logger(__name__)

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, slots=True)
class StoredImage:
    job: str
    shard_id: int
    epoch: int
    version: int
    number: int
    """An end entry with this log number, or a later one, makes the image superfluous."""
    sha256: str

    @property
    def key(self) -> tuple[str, int]:
        return self.job, self.shard_id

    @property
    def name(self) -> str:
        stem = f"{self.shard_id:05d}-{self.epoch}-{self.version}-{self.number}-{self.sha256}"
        return f"{stem}.safetensors"

    @property
    def path(self) -> str:
        return f"{self.job}/{self.name}"


class JournalImages:
    """The image files of a journal. Calls block, and raise Unavailable if the disk fails."""

    def __init__(self, directory: Path) -> None:
        self._files = Storage(Location.of_directory(directory))

    def list(self) -> list[StoredImage]:
        """List the images, and remove other files, which a process left unfinished."""
        kept = []
        for path in self._files.sizes(""):
            job, _, name = path.rpartition("/")
            match = _NAME.fullmatch(name)
            if match is None:
                log.info("journal_draft_removed", file=path)
                self._files.remove([path])
                continue
            shard_id, epoch, version, number = map(int, match.groups()[:4])
            kept.append(StoredImage(job, shard_id, epoch, version, number, match[5]))
        return kept

    def write(
        self, job: str, epoch: int, number: int, image: Image, placement_id: str = ""
    ) -> StoredImage:
        """Write an image with `fsync`. `number`: see `StoredImage`."""
        file = image_file.DigestingReader(image_file.pieces(image, placement_id))
        shard_id, version = image.shard_id, image.version

        def kept() -> StoredImage:
            return StoredImage(job, shard_id, epoch, version, number, file.sha256)

        self._files.write_pieces(job, lambda: kept().name, file)
        return kept()

    def read(self, kept: StoredImage) -> LoadedImage:
        """Raises JournalDamaged, naming the file, if it has changed or is gone."""
        data = self._files.read(kept.path) or b""
        try:
            return image_file.from_bytes(
                data, sha256=kept.sha256, file=kept.path, shard_id=kept.shard_id
            )
        except SnapshotDamaged as error:
            raise JournalDamaged(
                error.what, seen=error.seen, expected=error.expected, details=error.details
            ) from error

    def remove(self, images: Sequence[StoredImage]) -> None:
        self._files.remove([kept.path for kept in images])
