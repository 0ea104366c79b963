"""A name for one process start, which is a secret, and what others may know it by.

Whoever has a member's incarnation can speak as that member: it is what tokens are checked by. So
only its owner, the coordinator and the parameter servers know it; rosters, the page, logs and
messages of errors have the public id.
"""

import hashlib
import secrets
import time
from functools import lru_cache
from uuid import UUID


def new_incarnation(unix_ms: int | None = None) -> str:
    """A fresh UUID of version 7 (RFC 9562): 48 bits of Unix milliseconds, then random ones.

    Its order is the order of process starts, as far as one host's clock tells.
    """
    unix_ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random_bits = secrets.randbits(74)
    value = (unix_ms & (1 << 48) - 1) << 80 | 7 << 76 | (random_bits >> 62) << 64
    return str(UUID(int=value | 2 << 62 | random_bits & (1 << 62) - 1))


@lru_cache(maxsize=16_384)
def public_id(incarnation: str) -> str:
    """16 hexadecimal digits that tell process starts apart, from which none can be derived.

    74 bits of an incarnation are random, so that nobody finds one by trying.
    """
    return hashlib.sha256(f"shoal incarnation\0{incarnation}".encode()).hexdigest()[:16]
