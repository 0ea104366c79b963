"""Paths in a bucket, with methods like pathlib's, by fsspec."""

import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

import fsspec

from shoal.checkpoint.directory import may_pass
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import BUCKET_KINDS

_EXPECTED = "a directory, file:///directory, s3://bucket/prefix, gs://... or az://..."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
READ_AHEAD_BYTES = 16 * 1024 * 1024
"""Block size of reads, mostly in sequence."""


@dataclass(frozen=True)
class BucketPath:
    """File or folder in a bucket. Its methods raise all errors of the storage as OSError, unlike
    those of an opened file."""

    url: str
    """URL without a trailing slash."""

    @cached_property
    def files(self) -> fsspec.AbstractFileSystem:
        return fsspec.core.url_to_fs(self.url)[0]

    @cached_property
    def key(self) -> str:
        """Path in the notation of fsspec's file system."""
        return str(fsspec.core.url_to_fs(self.url)[1])

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        return BucketPath(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> "BucketPath":
        return BucketPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def size(self) -> int:
        """Return the size of the file in bytes; -1 if there is none."""
        with self._errors_as_os_error():
            self.files.invalidate_cache()
            try:
                info = self.files.info(self.key)
            except FileNotFoundError:
                return -1
        return int(info["size"]) if info["type"] == "file" else -1

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the file."""
        with self._errors_as_os_error():
            opened = self.files.open(self.key, mode, block_size=READ_AHEAD_BYTES)
        return cast(BinaryIO, opened)

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        with self._errors_as_os_error(), self.open() as file:
            return file.read()

    def write_bytes(self, data: bytes) -> None:
        """Write the file atomically, replacing an existing one."""
        with self._errors_as_os_error():
            self.files.pipe_file(self.key, data)

    def copy(self, name: str) -> None:
        """Copy this file within its folder, atomically, replacing an existing file. A late copy,
        when this file is gone, copies nothing."""
        with self._errors_as_os_error():
            self.files.cp_file(self.key, (self.parent / name).key)

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder; empty if there is no such folder."""
        with self._errors_as_os_error():
            self.files.invalidate_cache()
            try:
                entries = self.files.ls(self.key, detail=True)
            except FileNotFoundError:
                return []
        paths = [entry["name"] for entry in entries if entry["type"] == "directory"]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def names(self) -> list[str]:
        """Return the relative paths of all files below this folder."""
        with self._errors_as_os_error():
            self.files.invalidate_cache()
            try:
                paths = self.files.find(self.key)
            except FileNotFoundError:
                return []
        start = len(self.key.rstrip("/")) + 1
        return sorted(path[start:] for path in paths)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of this folder, if they exist."""
        with self._errors_as_os_error():
            for name in names:
                # Not `rm`: it reads names as patterns, and s3fs drops the errors of single files.
                with suppress(FileNotFoundError):
                    self.files.rm_file((self / name).key)

    def probe(self) -> None:
        """Check that files can be written, copied, read and removed here. Raises InvalidSpec if
        not, and OSError if a later check may succeed."""
        probe = self / f".probe-{secrets.token_hex(8)}"
        copy = self / f"{probe.name}-copy"
        try:
            probe.write_bytes(b"shoal")
            probe.copy(copy.name)
            read = copy.read_bytes()
            self.remove([probe.name, copy.name])
        except OSError as error:
            if may_pass(error):
                raise
            raise InvalidSpec(
                f"checkpoints cannot be kept at {self}",
                seen=f"{type(error).__name__}: {error}",
                expected="storage that answers, and lets files be written, copied and removed",
                fix="Check the URL and the credentials, and whether the bucket exists.",
            ) from error
        if read != b"shoal":
            raise InvalidSpec(f"checkpoints cannot be kept at {self}", seen=f"read {read!r}")

    @contextmanager
    def _errors_as_os_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each kind of storage has its own errors
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error


CheckpointPath = Path | BucketPath


def located(location: str | os.PathLike[str] | BucketPath) -> CheckpointPath:
    """Return the path of a directory, absolute, or of a URL. Raises InvalidSpec for a URL that is
    unsupported or for which no package is installed."""
    if isinstance(location, BucketPath):
        return location
    name = os.fspath(location)
    scheme = _SCHEME.match(name)
    if "::" not in name and scheme is None:
        # The script may change its working directory.
        return Path(name).expanduser().absolute()
    kind = scheme[1].lower() if scheme else ""
    remainder = name[scheme.end() :] if scheme else ""
    if "::" in name or not remainder.startswith("/") or "?" in remainder or "#" in remainder:
        raise _not_a_path(name)
    if kind == "file" and remainder.startswith("//"):
        return Path(remainder[1:])
    segments = remainder[1:].rstrip("/").split("/")
    if kind not in BUCKET_KINDS or any(each in ("", ".", "..") for each in segments):
        raise _not_a_path(name)
    path = BucketPath(f"{BUCKET_KINDS[kind]}://{'/'.join(segments)}")
    try:
        _ = path.files
    except (ImportError, ValueError) as error:
        raise InvalidSpec(
            "no installed filesystem reaches that location for checkpoints",
            seen=f"{name!r}: {error}",
            expected=f"what fsspec needs for {kind}",
            fix="For S3: pip install 'shoal[s3]'.",
        ) from error
    return path


def size_of(path: CheckpointPath) -> int:
    """Return the size of a file in bytes; -1 if there is none."""
    if isinstance(path, BucketPath):
        return path.size()
    return path.stat().st_size if path.is_file() else -1


def _not_a_path(name: str) -> InvalidSpec:
    return InvalidSpec(
        "that is not a location for checkpoints", seen=repr(name)[:200], expected=_EXPECTED
    )
