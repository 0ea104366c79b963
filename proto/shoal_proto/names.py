"""Rules for names, key prefixes, and storage URLs; names of phases as people see them."""

import re
from collections.abc import Mapping

from shoal_proto.errors import InvalidSpec

MAX_NAME_LENGTH = 128
NAME_RULE = f"1 to {MAX_NAME_LENGTH} letters, digits, '.', '_' or '-', not starting with '.' or '-'"

SERIES_RULE = f"JOB/NAME, each of {NAME_RULE}"

MAX_PREFIX_LENGTH = 200
PREFIX_RULE = (
    "names of letters, digits, '.', '_' and '-', each after a slash, as in /team-a:"
    f" at most {MAX_PREFIX_LENGTH} characters"
)

_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)*")
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")


SHOWN_PHASES: Mapping[str, str] = {
    "collect": "waiting",
    "prepare": "starting",
    "committed": "starting",
    "aborted": "starting",
}
"""Names of a job's phases before training, as people see them."""

BUCKET_KINDS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    # Used by tests only.
    "memory": "memory",
}
"""Kinds of storage besides directories, by scheme of the URL. Other schemes are not passed to
`fsspec`, which opens more than storage."""


def is_name(text: str) -> bool:
    """True if `text` follows `NAME_RULE`."""
    return _NAME.fullmatch(text) is not None


def is_series(text: str) -> bool:
    """True if `text` follows `SERIES_RULE`."""
    parts = text.split("/")
    return len(parts) == 2 and all(map(is_name, parts))


def check_name(name: str, what: str) -> None:
    """Raise InvalidSpec unless `name` follows `NAME_RULE`. `what`: kind of thing, such as "job"."""
    if not is_name(name):
        seen = repr(name[: 2 * MAX_NAME_LENGTH])
        raise InvalidSpec(f"bad name of a {what}", seen=seen, expected=NAME_RULE)


def check_prefix(prefix: str) -> None:
    """Raise InvalidSpec unless the keys of a cluster may begin with `prefix` (--prefix)."""
    expected = ""
    if not _PREFIX.fullmatch(prefix) or len(prefix) > MAX_PREFIX_LENGTH:
        expected = PREFIX_RULE
    elif "/shoal/v1/" in f"{prefix}/":
        expected = "a prefix without /shoal/v1, below which another cluster has its keys"
    if expected:
        raise InvalidSpec("bad --prefix", seen=repr(prefix[:MAX_PREFIX_LENGTH]), expected=expected)
