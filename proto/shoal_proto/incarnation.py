"""A name for one process start."""

import secrets
import time
from uuid import UUID


def new_incarnation(unix_ms: int | None = None) -> str:
    """A fresh UUID of version 7 (RFC 9562): 48 bits of Unix milliseconds, then random ones.

    Its order is the order of process starts, as far as one host's clock tells.
    """
    unix_ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random_bits = secrets.randbits(74)
    value = (unix_ms & (1 << 48) - 1) << 80 | 7 << 76 | (random_bits >> 62) << 64
    return str(UUID(int=value | 2 << 62 | random_bits & (1 << 62) - 1))
