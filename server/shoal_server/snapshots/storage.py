"""Files under one URL: a local directory, or whatever else `fsspec` reaches, S3 above all.

A file is there whole or not at all. Object stores promise that by themselves; on a local disk a
file gets its name once its bytes are on the disk. Every call blocks; call it from a thread.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from shoal_proto.errors import InvalidSpec, ShoalError, Unavailable

FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs")
"""Where there are no folders to be made."""


class Storage:
    """Paths are relative to the URL, with forward slashes. Any thread."""

    def __init__(self, url: str) -> None:
        """Raises InvalidSpec for a URL that nothing installed can serve."""
        self.url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise InvalidSpec(
                "no storage can be reached under that URL",
                seen=f"{url!r}: {error}",
                expected="a directory, file:///directory, s3://bucket/prefix, ...",
                fix="For S3: pip install 'shoal[s3]'.",
            ) from error
        self._root = root.rstrip("/")
        if not url or not self._root.lstrip("/"):
            raise InvalidSpec("snapshots need a directory of their own", seen=repr(url))
        self._has_folders = not any(each in FLAT for each in _protocols(self._files.protocol))

    def write(self, path: str, data: bytes) -> None:
        """Write a file, in the place of one that is there. Raises Unavailable."""
        try:
            if isinstance(self._files, LocalFileSystem):
                _write_local(Path(self._full(path)), data)
                return
            if self._has_folders:
                self._files.makedirs(self._full(path).rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._full(path), data)
        except Exception as error:
            raise self._failed("written", path, error) from error

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None if it is not there. Raises Unavailable."""
        try:
            data = self._files.cat_file(self._full(path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", path, error) from error
        return bytes(data)

    def sizes(self, folder: str) -> dict[str, int]:
        """Every file below a folder with its size in bytes. Raises Unavailable."""
        try:
            # Others write here too.
            self._files.invalidate_cache()
            found = self._files.find(self._full(folder), detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._failed("listed", folder, error) from error
        start = len(self._root) + 1
        return {path[start:]: int(entry["size"]) for path, entry in sorted(found.items())}

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder. Raises Unavailable."""
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._full(folder), detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._failed("listed", folder, error) from error
        folders = [entry["name"] for entry in found if entry["type"] == "directory"]
        return sorted(name.rstrip("/").rpartition("/")[2] for name in folders)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, and the folders that become empty by it. Raises Unavailable."""
        parents = set()
        for path in paths:
            try:
                self._files.rm_file(self._full(path))
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._failed("removed", path, error) from error
            parents.add(self._full(path).rpartition("/")[0])
        for parent in parents if self._has_folders else ():
            self._remove_if_empty(parent)

    def _remove_if_empty(self, folder: str) -> None:
        try:
            if not self._files.ls(folder, detail=False):
                self._files.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed("removed", folder, error) from error

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _failed(self, done: str, path: str, error: Exception) -> ShoalError:
        return Unavailable(
            f"{self.url}/{path} cannot be {done}",
            seen=f"{type(error).__name__}: {error}",
            expected="storage that answers, has room and permits it",
        )


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names of the files in a local folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _protocols(protocol: str | tuple[str, ...]) -> tuple[str, ...]:
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


__all__ = ["Storage", "sync_folder"]
