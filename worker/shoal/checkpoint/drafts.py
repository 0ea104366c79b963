"""Drafts: checkpoints that are being written, invisible to readers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shoal.checkpoint import directory
from shoal.checkpoint.bucket_paths import size_of
from shoal.checkpoint.entries import CheckpointEntry, FileSpan, write_files, write_index
from shoal.checkpoint.reading import check_written


class Draft(ABC):
    """Draft of the checkpoint at a path. The first rank begins the draft, and the other ranks join
    it by its name. Methods raise OSError and InvalidSpec."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the draft; empty before it is begun."""

    @abstractmethod
    def begin(self) -> None:
        """Begin the draft. Raises InvalidSpec if the path exists and is not a checkpoint."""

    @abstractmethod
    def join(self, name: str) -> None:
        """Join a draft that another rank has begun."""

    @abstractmethod
    def shares_storage(self) -> bool:
        """True if this rank sees the first rank's draft."""

    @abstractmethod
    def write(self, rank: int, entries: Sequence[tuple[CheckpointEntry, object]]) -> list[FileSpan]:
        """Write the rank's file durably; return the entries' spans, in the given order."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Return the size of a file in bytes; -1 if there is none."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove leftovers of dead writers, when no other writer is alive."""

    @abstractmethod
    def publish(self, stored: Iterable[tuple[CheckpointEntry, FileSpan]]) -> None:
        """Publish the draft as the checkpoint, replacing an existing one. Raises CheckpointFailed
        if a reader would refuse the written files."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the draft, if it was begun."""


class LocalDraft(Draft):
    """Draft in its own directory, which `publish` renames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial: Path | None = None

    @property
    def name(self) -> str:
        return self._partial.name if self._partial else ""

    @property
    def _folder(self) -> Path:
        assert self._partial is not None, "the draft was begun or joined"
        return self._partial

    def begin(self) -> None:
        self._partial = directory.begin(self._path)

    def join(self, name: str) -> None:
        self._partial = self._path.with_name(name)

    def shares_storage(self) -> bool:
        return self._folder.is_dir()

    def write(self, rank: int, entries: Sequence[tuple[CheckpointEntry, object]]) -> list[FileSpan]:
        return write_files(FileSystemWriter(self._folder, per_thread_copy_ahead=0), rank, entries)

    def size(self, file: str) -> int:
        return size_of(self._folder / file)

    def sweep(self) -> None:
        directory.sweep(self._path, keep=self._folder)

    def publish(self, stored: Iterable[tuple[CheckpointEntry, FileSpan]]) -> None:
        write_index(self._folder, stored)
        check_written(self._folder, (self._folder / directory.METADATA).read_bytes())
        directory.publish(self._folder, self._path)

    def discard(self) -> None:
        if self._partial is not None:
            directory.discard(self._partial)
