"""Time limit for admission by a coordinator."""

import re

from shoal_proto.errors import InvalidSpec

ADMISSION_S = 10.0
ADMISSION_VARIABLE = "SHOAL_ADMISSION_S"
MAX_ADMISSION_S = 365 * 24 * 3600


def admission_s(text: str) -> float:
    """Parse SHOAL_ADMISSION_S, in seconds; empty: the default. Raises InvalidSpec."""
    if not text:
        return ADMISSION_S
    if re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= MAX_ADMISSION_S:
        return float(text)
    raise InvalidSpec(
        f"bad {ADMISSION_VARIABLE}",
        seen=repr(text[:40]),
        expected=f"whole seconds, 1 to {MAX_ADMISSION_S} (a year)",
    )
