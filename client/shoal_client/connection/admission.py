"""How long a process waits until a coordinator admits it, and where it is told."""

import re

from shoal_proto.errors import InvalidSpec

ADMISSION_S = 10.0
"""How long a coordinator may take to admit a member, where nothing else is said."""
ADMISSION_VARIABLE = "SHOAL_ADMISSION_S"
MAX_ADMISSION_S = 365 * 24 * 3600


def admission_s(text: str) -> float:
    """What SHOAL_ADMISSION_S says, in seconds. Raises InvalidSpec."""
    if not text:
        return ADMISSION_S
    if re.fullmatch("[0-9]{1,9}", text) and 1 <= int(text) <= MAX_ADMISSION_S:
        return float(text)
    raise InvalidSpec(
        f"bad {ADMISSION_VARIABLE}",
        seen=repr(text[:40]),
        expected=f"whole seconds, 1 to {MAX_ADMISSION_S} (a year)",
    )
