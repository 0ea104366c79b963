"""A lock whose release shows that its owner ends, before the kernel has freed the process' memory.

The kernel reports an exit once that memory is freed: 20 to 40 ms after the signal if the process
had loaded torch. It releases robust locks (`set_robust_list(2)`) first, 0.2 ms after the signal.
So a worker's main thread holds such a lock in shared memory, and a thread of the launcher waits for
the lock.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

SIZE_BYTES = 72
_MUTEX = 8
"""Offset of the mutex, after the holder's process id. `pthread_mutex_t` needs up to 48 bytes (glibc
on aarch64), aligned to 8."""
_PID = struct.Struct("@Q")
_EXITING = 0x4
"""PF_EXITING: the process has begun to exit."""
_LOOK_EVERY_S = 0.2

_libc = ctypes.CDLL(None)


class Lifeline:
    """A worker's lock, at `offset` of shared memory."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._offset = memory, offset
        start = ctypes.c_char.from_buffer(memory, offset)
        # Only the address is kept: memory with a live buffer could not be closed.
        self._mutex = ctypes.c_void_p(ctypes.addressof(start) + _MUTEX)

    # --- the worker ---

    def hold(self) -> bool:
        """Hold the lock until `release` or the end of this process; False if impossible. Must be
        called on the main thread: no other thread lives as long as its process.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        result = _libc.pthread_mutex_trylock(self._mutex)
        if result == errno.EOWNERDEAD:  # held by the program that ran in this process before exec
            _libc.pthread_mutex_consistent(self._mutex)
        elif result:
            return False
        # Never unmap the memory: the C library keeps a list of held locks in it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self._holder = os.getpid()
        return True

    @property
    def other_holder(self) -> int:
        """Id of another live process that holds the lock; 0: none."""
        holder = self._holder
        return holder if holder != os.getpid() and Path(f"/proc/{holder}").exists() else 0

    def release(self) -> None:
        """Release the lock, so that the process' end does not count as a death. Only the main
        thread can release it."""
        if self._holder != os.getpid():
            return
        self._holder = 0
        _libc.pthread_mutex_unlock(self._mutex)

    # --- the launcher ---

    def prepare(self) -> None:
        """Create a new lock without a holder. Call it while no process holds or awaits the lock."""
        self._holder = 0
        attributes = (ctypes.c_char * 64)()
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, 1)
        _libc.pthread_mutexattr_setrobust(attributes, 1)
        _libc.pthread_mutex_init(self._mutex, attributes)

    def await_exit(self, pid: int) -> bool:
        """Wait while process `pid` holds the lock; True if the process has begun to exit."""
        if self._holder != pid:
            return False
        result: int = _libc.pthread_mutex_lock(self._mutex)
        if result == errno.EOWNERDEAD:
            _libc.pthread_mutex_consistent(self._mutex)
        elif result:
            return False
        self._holder = 0
        _libc.pthread_mutex_unlock(self._mutex)
        return result == errno.EOWNERDEAD

    @property
    def _holder(self) -> int:
        pid: int = _PID.unpack_from(self._memory, self._offset)[0]
        return pid

    @_holder.setter
    def _holder(self, pid: int) -> None:
        _PID.pack_into(self._memory, self._offset, pid)


class ExitWatch:
    """Calls `on_exit` with the exit code, on its own thread, once a process begins to exit while it
    holds its lifeline; not for code 0."""

    def __init__(self, lifeline: Lifeline, pid: int, on_exit: Callable[[int], None]) -> None:
        self._lifeline, self._pid, self._on_exit = lifeline, pid, on_exit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"shoal-life-{pid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the watch; call it only once the process is gone."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            if self._lifeline.await_exit(self._pid):
                code = exit_code_of(self._pid)
                if code is not None:
                    self._on_exit(code)
                    return


def exit_code_of(pid: int) -> int | None:
    """The exit code of a process that has begun to exit; -N for signal N. None if the code is 0 or
    not known.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The program's name, in parentheses, may contain anything. The fields after it count from 3.
    fields = text[text.rindex(")") + 1 :].split()
    flags, status = int(fields[9 - 3]), int(fields[52 - 3])
    if not flags & _EXITING or not status:
        return None
    return os.waitstatus_to_exitcode(status)
