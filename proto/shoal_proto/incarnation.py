"""Incarnations: the secret name of a process start, and its public id.

A process that knows a member's incarnation can act as that member. Only the member, its launcher,
the coordinator, etcd and the parameter servers have it.
"""

import hashlib
import secrets
import time
from functools import lru_cache
from uuid import UUID


def new_incarnation(unix_ms: int | None = None) -> str:
    """Return a fresh UUID of version 7 (RFC 9562): Unix milliseconds, then 74 random bits.
    Incarnations are ordered by the time of the process start, by the host's clock.
    """
    unix_ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random_bits = secrets.randbits(74)
    value = (unix_ms & (1 << 48) - 1) << 80 | 7 << 76 | (random_bits >> 62) << 64
    return str(UUID(int=value | 2 << 62 | random_bits & (1 << 62) - 1))


@lru_cache(maxsize=16_384)
def public_id(incarnation: str) -> str:
    """Return 16 hexadecimal digits that identify a process start. They do not reveal its
    incarnation, which has too many random bits to be found by trying.
    """
    return hashlib.sha256(f"shoal incarnation\0{incarnation}".encode()).hexdigest()[:16]
