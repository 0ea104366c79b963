"""Checkpoints in a bucket: complete or absent, although nothing can be renamed there.

    step-00000120/.metadata                      the index: written last, atomically
    step-00000120/<token>__0_0.distcp            a file that the index names
    step-00000120/<token>.begun                  marks a draft, even if its writer has died
    step-00000120/<token>.index                  the index of a draft, until it is published

A checkpoint is a folder with an index, and the files that the index names. A writer replaces a
checkpoint by new files with another token, and then overwrites the index.

A storage may carry out a request after the client has given up. So a writer publishes by copying
the draft's index to `.metadata`, and discards a draft by removing the draft's index first. A late
copy then finds nothing to copy: no index ever names removed files.

A writer may also be halted, and go on when another has removed its draft. So it publishes only if
its `.begun` is there after its `.index` is written. Others remove `.begun` files first, then
`.index` files, and at last the files that no index names.
"""

import re
import secrets
from collections.abc import Iterable, Sequence

import structlog

from shoal.checkpoint.bucket_paths import BucketPath, size_of
from shoal.checkpoint.directory import METADATA, STEP, may_pass, not_a_checkpoint
from shoal.checkpoint.drafts import Draft
from shoal.checkpoint.entries import CheckpointEntry, FileSpan, index_of, write_files
from shoal.checkpoint.index import read_index
from shoal.checkpoint.reading import check_written
from shoal.torch_private.checkpoint import FsspecWriter
from shoal_proto.errors import CheckpointFailed, InvalidSpec, ShoalError

log = structlog.get_logger(__name__)

_BEGUN = ".begun"
_INDEX = ".index"
_STORED_INDEX = re.compile(f"{STEP.pattern}/{re.escape(METADATA)}")
_DRAFT_FILE = re.compile(r"[0-9a-f]{16}(__\d+_\d+\.distcp|\.begun|\.index)")


def complete(root: BucketPath) -> dict[int, BucketPath]:
    """Return all complete checkpoints by step. Raises InvalidSpec if that fails, and OSError if it
    may succeed later."""
    try:
        return {
            int(matched[1]): root / name.partition("/")[0]
            for name in root.names()
            if (matched := _STORED_INDEX.fullmatch(name))
        }
    except OSError as error:
        if may_pass(error):
            raise
        raise InvalidSpec(
            f"the location {root} for checkpoints cannot be read",
            seen=str(error),
            expected="storage that answers, and a bucket that exists",
        ) from error


def discard(path: BucketPath) -> None:
    """Delete a folder that may be a checkpoint, its index first; log a warning if that fails."""
    try:
        _stop_writers(path)
        path.remove([METADATA])
        path.remove(path.names())
    except OSError as error:
        # The next `retire` tries again, if the index is left.
        log.warning("leftover_not_removed", path=str(path), error=str(error))


class BucketDraft(Draft):
    """Draft in a bucket: files whose names begin with the draft's token."""

    def __init__(self, path: BucketPath) -> None:
        self._path = path
        self._name = ""
        self._index = b""

    @property
    def name(self) -> str:
        return self._name

    def begin(self) -> None:
        names = self._path.names()
        foreign = [name for name in names if name != METADATA and not _DRAFT_FILE.fullmatch(name)]
        if foreign and METADATA not in names:
            raise not_a_checkpoint(self._path, foreign[0])
        name = secrets.token_hex(8)
        (self._path / f"{name}{_BEGUN}").write_bytes(b"")
        self._name = name

    def join(self, name: str) -> None:
        self._name = name

    def shares_storage(self) -> bool:
        return self.size(f"{self.name}{_BEGUN}") >= 0

    def write(self, rank: int, entries: Sequence[tuple[CheckpointEntry, object]]) -> list[FileSpan]:
        writer = FsspecWriter(str(self._path), per_thread_copy_ahead=0, sync_files=False)
        try:
            return write_files(writer, rank, entries, prefix=self.name)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def size(self, file: str) -> int:
        return size_of(self._path / file)

    def sweep(self) -> None:
        for name in self._path.parent.folders():
            path = self._path.parent / name
            if STEP.fullmatch(name) or name == self._path.name:
                try:
                    self._sweep(path)
                except (OSError, ShoalError) as error:
                    # A damaged index does not say which files are leftovers.
                    log.warning("leftover_not_removed", path=str(path), error=str(error))

    def _sweep(self, path: BucketPath) -> None:
        names = [name for name in path.names() if not name.startswith(self.name)]
        if METADATA in names and not any(name.endswith(_BEGUN) for name in names):
            return
        leftovers = _unused(path, names)
        if leftovers:
            log.info("leftover_removed", path=str(path), num_files=len(leftovers))
            _stop_writers(path, but=self.name)
            path.remove(_unused(path, leftovers))

    def publish(self, stored: Iterable[tuple[CheckpointEntry, FileSpan]]) -> None:
        self._index = index_of(stored)
        check_written(self._path, self._index)
        draft = self._path / f"{self.name}{_INDEX}"
        draft.write_bytes(self._index)
        if not self.shares_storage():
            raise CheckpointFailed(
                f"another writer has removed the draft of {self._path}",
                seen=f"no {self.name}{_BEGUN}",
                expected="no other writer: this process was halted, or two jobs write here",
                fix="Give each job a directory of its own.",
                details={"path": str(self._path)},
            )
        draft.copy(METADATA)
        try:
            _stop_writers(self._path)
            self._path.remove(set(self._path.names()) - _files_of(self._path))
        except (OSError, ShoalError) as error:
            # The leftovers are removed with this checkpoint.
            log.warning("leftover_not_removed", path=str(self._path), error=str(error))

    def discard(self) -> None:
        if not self.name:
            return
        try:
            self._path.remove([f"{self.name}{_INDEX}"])
            if self._was_published():
                log.info("checkpoint_complete_despite_error", path=str(self._path))
                return
            self._path.remove(name for name in self._path.names() if name.startswith(self.name))
        except OSError as error:
            log.warning("leftover_not_removed", path=str(self._path), error=str(error))

    def _was_published(self) -> bool:
        try:
            return bool(self._index) and (self._path / METADATA).read_bytes() == self._index
        except FileNotFoundError:
            return False


def _stop_writers(path: BucketPath, but: str | None = None) -> None:
    """Keep the writers of all drafts except `but` from publishing them."""
    for ending in (_BEGUN, _INDEX):
        drafts = [name for name in path.names() if _DRAFT_FILE.fullmatch(name)]
        path.remove(name for name in drafts if name.endswith(ending) and name != f"{but}{ending}")


def _unused(path: BucketPath, names: Sequence[str]) -> list[str]:
    """Return the names of files that may be removed: those that the index does not name or,
    without an index, those of drafts."""
    if size_of(path / METADATA) < 0:
        return [name for name in names if _DRAFT_FILE.fullmatch(name)]
    used = _files_of(path)
    return [name for name in names if name not in used]


def _files_of(path: BucketPath) -> set[str]:
    index = read_index(path)
    spans = [span for stored in index.tensors.values() for span in stored.chunks.values()]
    return {METADATA} | {file for file, _, _ in (*spans, *index.objects.values())}
