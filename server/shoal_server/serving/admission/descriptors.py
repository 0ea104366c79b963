"""File descriptors: how many this process may have, and which it reserves for its own work, such as
the connection to etcd."""

import resource

import structlog

log = structlog.get_logger(__name__)

RESERVED = 128
MOST = 1 << 20
"""Bound beyond which the kernel's tables cost more than connections are worth."""


def raise_limit() -> int:
    """Raise the soft limit to the hard limit, at most MOST; return `limit()`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("descriptors_raised", before=soft, now=wanted)
    return limit()


def limit() -> int:
    """Maximum number of descriptors of this process, up to MOST."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


def descriptors_for_callers(share: float) -> int:
    """Number of descriptors for callers: this share of the unreserved ones, at least 1."""
    return max(1, int((limit() - RESERVED) * share))


def is_reserved(descriptor: int) -> bool:
    """True for a descriptor in the reserve: the system assigns the lowest free number."""
    return descriptor >= limit() - RESERVED
