"""Checkpoints that are being written: each is none before it is published."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shoal.checkpoint import directory
from shoal.checkpoint.bucket_paths import size_of
from shoal.checkpoint.entries import CheckpointEntry, Place, write_files, write_index
from shoal.checkpoint.reading import check_written


class Draft(ABC):
    """What will be the checkpoint at a path. The first rank begins it, and tells the others its
    name. Raises OSError as the system does, and InvalidSpec."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Empty before it is begun or joined."""

    @abstractmethod
    def begin(self) -> None:
        """Raises InvalidSpec if something else than a checkpoint is there."""

    @abstractmethod
    def join(self, name: str) -> None:
        """Take part in one that another rank has begun."""

    @abstractmethod
    def is_seen(self) -> bool:
        """Whether this rank sees what the first one has begun: their storage is one."""

    @abstractmethod
    def write(self, rank: int, entries: Sequence[tuple[CheckpointEntry, object]]) -> list[Place]:
        """Write the rank's file, durably, and tell where each entry is, in the same order."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Bytes of one of its files; -1 if there is none."""

    @abstractmethod
    def sweep(self) -> None:
        """Remove what dead writers left. Only for who knows that no other one is alive there."""

    @abstractmethod
    def publish(self, stored: Iterable[tuple[CheckpointEntry, Place]]) -> None:
        """Let it become the checkpoint, in the place of one that is there.

        Raises CheckpointFailed if a reader would refuse what was written.
        """

    @abstractmethod
    def discard(self) -> None:
        """Leave nothing of it, if it was begun."""


class LocalDraft(Draft):
    """In a directory aside, which is renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial: Path | None = None

    @property
    def name(self) -> str:
        return self._partial.name if self._partial else ""

    @property
    def _aside(self) -> Path:
        assert self._partial is not None, "it was begun, or joined"
        return self._partial

    def begin(self) -> None:
        self._partial = directory.begin(self._path)

    def join(self, name: str) -> None:
        self._partial = self._path.with_name(name)

    def is_seen(self) -> bool:
        return self._aside.is_dir()

    def write(self, rank: int, entries: Sequence[tuple[CheckpointEntry, object]]) -> list[Place]:
        # Nothing is on a GPU any more, so nothing is to be copied ahead.
        return write_files(FileSystemWriter(self._aside, per_thread_copy_ahead=0), rank, entries)

    def size(self, file: str) -> int:
        return size_of(self._aside / file)

    def sweep(self) -> None:
        directory.sweep(self._path, keep=self._aside)

    def publish(self, stored: Iterable[tuple[CheckpointEntry, Place]]) -> None:
        write_index(self._aside, stored)
        check_written(self._aside, (self._aside / directory.METADATA).read_bytes())
        directory.publish(self._aside, self._path)

    def discard(self) -> None:
        if self._partial is not None and self._partial.exists():
            directory.discard(self._partial)
