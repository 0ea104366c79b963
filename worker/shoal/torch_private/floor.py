"""The oldest supported torch."""

import re

from shoal_proto.errors import InvalidSpec

OLDEST = (2, 9)
"""The oldest version that the tests pass with. Older ones were not tried."""


def check_version(version: str) -> None:
    """Raise InvalidSpec for a torch that is too old. An unreadable version passes."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidSpec(
            "this torch is too old for Shoal",
            seen=f"torch {version}",
            expected=f"torch {oldest} or newer",
            fix=f"pip install 'torch>={oldest}'",
        )
