"""The oldest torch."""

import re

from shoal_proto.errors import InvalidSpec

OLDEST = (2, 13)
"""Tried: 2.12.1 fails under `fully_shard`, 2.10.0 at the first import."""


def check_version(version: str) -> None:
    """Raise InvalidSpec for a torch that is too old. One whose version tells nothing may pass."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidSpec(
            "this torch is too old for Shoal",
            seen=f"torch {version}",
            expected=f"torch {oldest} or newer",
            fix=f"pip install 'torch>={oldest}'",
        )
