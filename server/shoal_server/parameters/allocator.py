"""Settings of the memory allocator: freed memory is kept for later pushes."""

import ctypes

import structlog

log = structlog.get_logger(__name__)

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
KEPT_BYTES = 256 * 1024 * 1024
"""Freed memory at the end of the heap that is kept for the next push."""
MAX_HEAP_CHUNK_BYTES = 32 * 1024 * 1024
"""Larger blocks are returned to the kernel when freed. This is the most that glibc allows."""


def keep_freed_memory() -> None:
    """Have glibc keep freed memory. Gradients arrive in pieces of a MiB: if their pages were
    returned to the kernel each time, faulting them in again would cost more than filling them. With
    another C library this does nothing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.info("allocator_unchanged", reason="no mallopt in this C library")
        return
    for option, value in (
        (_M_MMAP_THRESHOLD, MAX_HEAP_CHUNK_BYTES),
        (_M_TRIM_THRESHOLD, KEPT_BYTES),
        (_M_TOP_PAD, MAX_HEAP_CHUNK_BYTES),
    ):
        if mallopt(option, value) != 1:
            log.warning("allocator_option_refused", option=option, value=value)
