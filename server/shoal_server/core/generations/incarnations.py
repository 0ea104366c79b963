"""Which of two process starts came first.

An incarnation is a UUID. Those of version 7 (RFC 9562) begin with the time at which they were made,
so that a call of the older process that arrives late cannot push the newer one out.
"""

from uuid import UUID


def is_older(incarnation: str, than: str) -> bool:
    """Whether `incarnation` was certainly made before `than`; False where that cannot be told."""
    first, second = _version_7(incarnation), _version_7(than)
    return first is not None and second is not None and first < second


def _version_7(text: str) -> UUID | None:
    try:
        value = UUID(text)
    except ValueError:
        return None
    return value if value.version == 7 else None
