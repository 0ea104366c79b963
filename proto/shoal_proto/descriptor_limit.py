"""The number of file descriptors that this process may have."""

import resource

import structlog

log = structlog.get_logger(__name__)

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
