"""Files at one location: a local directory, or a prefix in a bucket that `fsspec` reaches.

A file exists whole or not at all. Every call blocks; call it from a thread.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import fsspec
import structlog
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from shoal_proto.errors import AccessDenied, InvalidSpec, ShoalError, Unavailable
from shoal_proto.pieces import Buffer
from shoal_server.serving.locations import AllowedRoots, Location, is_below

log = structlog.get_logger(__name__)

WITH_FOLDERS = ("file", "memory")


class Storage:
    """Files below one location, for any thread. Paths are relative, with forward slashes. A path
    that leads out of the location raises AccessDenied."""

    def __init__(self, location: str | Location, *, url: str = "") -> None:
        """`url`: the URL of a Location, for messages. Raises InvalidSpec for a URL that is not
        an allowed location, or for which no package is installed; Unavailable if the storage cannot
        be set up."""
        self.location = Location.parse(location) if isinstance(location, str) else location
        self.url = (location if isinstance(location, str) else url or location.path).rstrip("/")
        try:
            self._files, root = _opened(self.location)
        except (ValueError, ImportError) as error:
            raise InvalidSpec(
                "no installed package reaches that storage",
                seen=f"{self.url!r}: {error}",
                expected=f"what fsspec needs for {self.location.protocol}",
                fix="For S3: pip install 'shoal[s3]'.",
            ) from error
        except Exception as error:
            raise self._failed("set up", "", error) from error
        self._root = root.rstrip("/")
        self._has_folders = self.location.protocol in WITH_FOLDERS

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a file. Raises Unavailable; then the path may have the old file, the new
        file or none."""
        full = self._full(path)
        try:
            if self.location.is_local:
                _write_local(Path(full), data)
                return
            if self._has_folders:
                self._files.makedirs(full.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(full, data)
        except Exception as error:
            raise self._failed("written", path, error) from error

    def write_pieces(self, folder: str, name: Callable[[], str], pieces: Iterable[Buffer]) -> None:
        """Write or replace a file from pieces. `name` is called after the last piece. A bucket gets
        all pieces at once. Raises Unavailable, also for an OSError of `pieces` on a local disk, and
        other errors of `pieces`."""
        if not self.location.is_local:
            data = b"".join(pieces)
            self.write(f"{folder}/{name()}", data)
            return
        try:
            _write_draft(Path(self._full(folder)), name, pieces)
        except OSError as error:
            raise self._failed("written", folder, error) from error

    def publish(self, draft: str, path: str) -> None:
        """Move a file to its final path, atomically. Once the draft is removed, a bucket's late
        request publishes nothing. Raises Unavailable; then the file may have been published."""
        source, target = self._full(draft), self._full(path)
        try:
            if self.location.is_local:
                _move_local(Path(source), Path(target))
                self._remove_if_empty(source.rpartition("/")[0])
                return
            if self._has_folders:
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.cp_file(source, target)
        except Exception as error:
            raise self._failed("published", path, error) from error
        try:
            self.remove([draft])
        except ShoalError as error:
            log.warning("draft_not_removed", path=f"{self.url}/{draft}", reason=str(error))

    def read(self, path: str) -> bytes | None:
        """Bytes of a file; None if it does not exist. Raises Unavailable."""
        full = self._full(path)
        try:
            data = bytes(self._files.cat_file(full))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", path, error) from error
        return data

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes in bytes of all files below a folder, by path below the location; empty without the
        folder. Raises Unavailable."""
        full, start = self._full(folder), len(self._root) + 1
        try:
            # Other processes write here too.
            self._files.invalidate_cache()
            found = self._files.find(full, detail=True)
            return {path[start:]: int(entry["size"]) for path, entry in sorted(found.items())}
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._failed("listed", folder, error) from error

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders directly in a folder, if it exists. Raises Unavailable."""
        full = self._full(folder)
        try:
            self._files.invalidate_cache()
            found = self._files.ls(full, detail=True)
            folders = [entry["name"] for entry in found if entry["type"] == "directory"]
            return sorted(name.rstrip("/").rpartition("/")[2] for name in folders)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._failed("listed", folder, error) from error

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files that exist, and each file's own folder if that is empty then. Raises
        Unavailable; then only some may be removed."""
        parents = set()
        for path in paths:
            full = self._full(path)
            try:
                self._files.rm_file(full)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._failed("removed", path, error) from error
            parents.add(full.rpartition("/")[0])
        for parent in parents if self._has_folders else ():
            self._remove_if_empty(parent)

    def _remove_if_empty(self, folder: str) -> None:
        try:
            if not self._files.ls(folder, detail=False):
                self._files.rmdir(folder)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failed("removed", folder, error) from error

    def _full(self, path: str) -> str:
        full = f"{self._root}/{path}"
        is_inside = ".." not in path.split("/")
        if is_inside and self.location.is_local:
            is_inside = is_below(os.path.realpath(full), self.location.path)
        if not is_inside:
            raise AccessDenied(
                "a file of a snapshot would lie outside its location",
                seen=path,
                expected=f"a path below {self.url}, with no link that leads out of it",
            )
        return full

    def _failed(self, done: str, path: str, error: Exception) -> ShoalError:
        return Unavailable(
            f"{self.url}/{path} cannot be {done}" if path else f"{self.url} cannot be {done}",
            seen=f"{type(error).__name__}: {error}",
            expected="storage that answers, has room and permits the access",
        )


def _write_local(path: Path, data: bytes) -> None:
    _write_draft(path.parent, lambda: path.name, (data,))


def _write_draft(folder: Path, name: Callable[[], str], pieces: Iterable[Buffer]) -> None:
    new_folders = _make_folder(folder)
    draft = folder / f".{secrets.token_hex(8)}"
    try:
        with draft.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folders(folder, new_folders)


def _move_local(draft: Path, path: Path) -> None:
    new_folders = _make_folder(path.parent)
    draft.replace(path)
    _sync_folders(path.parent, new_folders)


def _make_folder(folder: Path) -> Sequence[Path]:
    new_folders = list(takewhile(lambda each: not each.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    return new_folders


def _sync_folders(folder: Path, new_folders: Sequence[Path]) -> None:
    sync_folder(folder)
    for each in new_folders:
        sync_folder(each.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a local folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(location: Location) -> tuple[AbstractFileSystem, str]:
    if location.is_local:
        return LocalFileSystem(), location.path
    files, root = fsspec.core.url_to_fs(location.url)
    return files, str(root)


def open_below(roots: AllowedRoots, url: str) -> Storage:
    """Storage at a URL that a caller names. Raises AccessDenied outside the roots, and what
    `Storage` raises."""
    return Storage(roots.locate(url), url=url)
