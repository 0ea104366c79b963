"""Locations of snapshots. Callers name URLs, which must be below roots that an operator configures.

`fsspec` reaches far more than storage: templates, other machines, chains (`a::b`). So URLs are
parsed here, and only the kinds of storage named below are passed on.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_proto.errors import AccessDenied, InvalidSpec
from shoal_proto.names import BUCKET_KINDS

LOCAL = "file"
_PROTOCOLS = {LOCAL: LOCAL, **BUCKET_KINDS}
EXPECTED = "/directory, file:///directory, s3://bucket/prefix, gs://... or az://..."
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Location:
    """A directory, or a prefix in a bucket."""

    protocol: str
    path: str
    """Absolute path of a local directory without symbolic links; otherwise bucket/prefix."""

    @classmethod
    def parse(cls, url: str) -> "Location":
        """Parse a URL, or an absolute path. Raises InvalidSpec unless it names one location below
        the root of a kind in `_PROTOCOLS`, without `.`, `..`, empty names, control characters and,
        for a bucket, `?`, `#` and backslashes."""
        protocol, colon, path = url.rpartition("://")
        if not colon:
            protocol = LOCAL
        if "::" in url or "://" in protocol:
            raise _bad(url, "one location, not a chain of file systems")
        if protocol not in _PROTOCOLS:
            raise _bad(url, EXPECTED)
        if _CONTROL.search(url):
            raise _bad(url, "no control characters")
        if protocol == LOCAL:
            return cls(LOCAL, _local_path(url, path))
        return cls(_PROTOCOLS[protocol], _bucket_path(url, path))

    @classmethod
    def of_directory(cls, directory: Path) -> "Location":
        """Location of a directory of this process' own choice."""
        return cls(LOCAL, os.path.realpath(directory))

    @property
    def is_local(self) -> bool:
        return self.protocol == LOCAL

    @property
    def url(self) -> str:
        """URL for `fsspec`; not used for local paths."""
        return f"{self.protocol}://{self.path}"

    def holds(self, other: "Location") -> bool:
        """True if `other` is this location or below it."""
        return self.protocol == other.protocol and is_below(other.path, self.path)


@dataclass(frozen=True)
class AllowedRoots:
    """URLs that an operator allows for snapshots, with all locations below them. Raises InvalidSpec
    for a URL that is not a location."""

    urls: Sequence[str]

    def __post_init__(self) -> None:
        for url in self.urls:
            Location.parse(url)

    def locate(self, url: str) -> Location:
        """Location that a caller names. Raises InvalidSpec, or AccessDenied outside the roots."""
        location = Location.parse(url)
        # Parsed again: symbolic links may have changed.
        if any(Location.parse(root).holds(location) for root in self.urls):
            return location
        raise AccessDenied(
            "snapshots are not allowed there",
            seen=url,
            expected=f"a URL below {', '.join(self.urls)}" if self.urls else "no snapshots at all",
            fix="Start the coordinators with --snapshot-root URL to allow another one.",
        )


def is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _local_path(url: str, path: str) -> str:
    if not path.startswith("/"):
        raise _bad(url, "an absolute path")
    _check_segments(url, path.strip("/").split("/"))
    return os.path.realpath(path)


def _bucket_path(url: str, path: str) -> str:
    path = path.rstrip("/")
    _check_segments(url, path.split("/"))
    if any(mark in path for mark in "?#\\"):
        raise _bad(url, "a bucket and a prefix, with no query")
    return path


def _check_segments(url: str, segments: Iterable[str]) -> None:
    for segment in segments:
        if segment == "":
            raise _bad(url, "a directory for the snapshots, and no empty name in its path")
        if segment in (".", ".."):
            raise _bad(url, f"a path without {segment!r}")


def _bad(url: str, expected: str) -> InvalidSpec:
    fix = "" if url else "Name one, or start the coordinator with --snapshot-url."
    return InvalidSpec(
        "that is not a location for snapshots", seen=repr(url)[:200], expected=expected, fix=fix
    )
