"""Mappings of memory files, aligned to 2 MiB, in pages of 2 MiB if the kernel can.

With pages of 4 KiB, each process takes a quarter of a million page faults per gigabyte of weights.
"""

import ctypes
import mmap
import os
import weakref

HUGE_BYTES = 2 * 1024 * 1024
HUGE_FROM_BYTES = 64 * 1024 * 1024
COLLAPSED_BYTES = 64 * 1024 * 1024
"""Size of one collapse, which interrupts all processors."""
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
"""Linux 5.14 and 6.1; the module `mmap` does not name them."""
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p

Window = ctypes.Array[ctypes.c_ubyte]
"""Mapped memory, unmapped when the last view of it, or tensor over it, is gone."""


def map_file(
    descriptor: int, num_bytes: int, *, prot: int, flags: int, is_inherited: bool = True
) -> Window:
    """Map a memory file of at least 1 byte; `prot` and `flags` are those of mmap(2).
    `is_inherited`: False to leave the mapping out of forked processes. Raises OSError."""
    address = _map_aligned(descriptor, num_bytes, prot, flags)
    window = (ctypes.c_ubyte * num_bytes).from_address(address)
    owner = None if is_inherited else os.getpid()
    weakref.finalize(window, _unmap, address, num_bytes, owner).atexit = False
    if not is_inherited:
        _advise(address, num_bytes, mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_FROM_BYTES:
        # If `shmem_enabled` is `advise`, the kernel then allocates huge pages at once.
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)
    return window


def populate(window: Window, start: int, num_bytes: int) -> bool:
    """Allocate and map pages, and keep their content: later writes do not fault. Returns False if
    the kernel cannot."""
    return _advise(ctypes.addressof(window) + start, num_bytes, MADV_POPULATE_WRITE)


def make_huge(window: Window, start: int, num_bytes: int) -> bool:
    """Put this part into huge pages, except its ends, and keep the content. Needs no system
    setting. Returns False if the kernel is too old or memory is fragmented."""
    address = ctypes.addressof(window)
    first = -(-(address + start) // HUGE_BYTES) * HUGE_BYTES
    last = (address + start + num_bytes) // HUGE_BYTES * HUGE_BYTES
    for at in range(first, last, COLLAPSED_BYTES):
        stop = min(at + COLLAPSED_BYTES, last)
        # The kernel refuses to collapse 2 MiB of which no page is allocated.
        for page in range(at, stop, HUGE_BYTES):
            _advise(page, mmap.PAGESIZE, MADV_POPULATE_WRITE)
        if not _advise(at, stop - at, MADV_COLLAPSE):
            return False
    return True


def protect(window: Window, num_bytes: int) -> None:
    """Make the pages read-only for this process, which a write then ends by SIGSEGV. Does nothing
    if the kernel refuses."""
    address = ctypes.c_void_p(ctypes.addressof(window))
    _libc.mprotect(address, ctypes.c_size_t(num_bytes), mmap.PROT_READ)


def _map_aligned(descriptor: int, num_bytes: int, prot: int, flags: int) -> int:
    reserving = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = _mmap(0, size + HUGE_BYTES, _PROT_NONE, reserving, -1)
    end = reserved + size + HUGE_BYTES
    address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    try:
        _mmap(address, num_bytes, prot, flags | _MAP_FIXED, descriptor)
    except OSError:
        _unmap(reserved, end - reserved)
        raise
    for start, stop in ((reserved, address), (address + size, end)):
        if start < stop:
            _unmap(start, stop - start)
    return address


def _mmap(address: int, num_bytes: int, prot: int, flags: int, descriptor: int) -> int:
    found: int = _libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        prot,
        flags,
        descriptor,
        ctypes.c_long(0),
    )
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


def _unmap(address: int, num_bytes: int, owner: int | None = None) -> None:
    """Unmap. `owner`: the only process that has the mapping; None: forked processes have it,
    too."""
    if owner is None or owner == os.getpid():
        _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Call madvise(2) without the GIL, which `mmap.madvise` would hold. Returns False if the kernel
    refuses."""
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
