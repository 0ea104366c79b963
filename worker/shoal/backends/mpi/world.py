"""Control messages between the ranks of an MPI job, and waits with deadlines.

Plain MPI waits for ever, and if one rank ends, the launcher kills the others. So every operation is
polled under a deadline. A rank that fails sends its reason on a separate communicator, which every
wait polls too. Then the ranks wait for a moment, so that each has raised its error before the
launcher kills them.
"""

import atexit
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

GOODBYE_S = 5.0
MAX_REASON_BYTES = 2048
_FAILED, _GONE = 1, 2
_SPINS = 200
_PAUSE_MAX_S = 0.001


class Requests:
    """Requests in progress, and the memory that MPI uses until they are complete."""

    def __init__(self, requests: list[MPI.Request], memory: Any) -> None:
        self.statuses = [MPI.Status() for _ in requests]
        self.error: MPI.Exception | None = None
        self._requests = requests
        self._memory = memory
        self._lock = threading.Lock()
        self._landed = False

    def is_complete(self) -> bool:
        """Test all requests; True if they are complete, with or without an `error`. Thread-safe."""
        with self._lock:
            if not self._landed:
                try:
                    self._landed = bool(MPI.Request.Testall(self._requests, self.statuses))
                except MPI.Exception as error:
                    self._landed, self.error = True, error
            return self._landed


class MpiWorld:
    """MPI.COMM_WORLD with deadlines. One object for the process."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure = ""
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.size = MPI.COMM_WORLD.Get_size()
        self.data = MPI.COMM_WORLD.Dup()
        self._control = MPI.COMM_WORLD.Dup()
        self._setup = MPI.COMM_WORLD.Dup()
        self._gone: set[int] = set()
        self._flights: list[Requests] = []
        self._lock = threading.Lock()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._report_uncaught
        atexit.register(self._leave)

    def wait(self, flight: Requests, what: str, timeout_s: float) -> None:
        """Wait until the requests are complete. Fails the job after `timeout_s`, or if a request
        fails. Raises DistBackendError if a request fails, or if the job fails before the requests
        are complete."""
        deadline_s = time.monotonic() + timeout_s
        tests, pause_s = 0, 1e-5
        while not flight.is_complete():
            self._receive_control()
            if self.failure:
                raise dist.DistBackendError(f"{what} failed: {self.failure}")
            if time.monotonic() > deadline_s:
                self.fail(f"rank {self.rank} waited more than {timeout_s:g} s in {what}")
                continue
            tests += 1
            if tests > _SPINS:
                # MPI has no blocking wait with a deadline.
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        if flight.error is not None:
            self.fail(f"{what} failed on rank {self.rank}: {flight.error}")
            raise dist.DistBackendError(f"{what} failed: {flight.error}") from flight.error

    def launch(self, requests: list[MPI.Request], memory: Any) -> Requests:
        """Track requests that have begun, and keep the memory until they are complete."""
        flight = Requests(requests, memory)
        with self._lock:
            self._flights = [each for each in self._flights if not each.is_complete()]
            self._flights.append(flight)
        return flight

    def fail(self, reason: str) -> None:
        """Make waits for incomplete requests raise on every rank. The first reason is kept."""
        self._receive_control()
        if self.failure:
            return
        self.failure = reason
        self._send_all(_FAILED, reason.encode()[:MAX_REASON_BYTES])

    def subset(self, ranks: Sequence[int], name: str) -> MPI.Intracomm:
        """Create a communicator of these ranks. Collective among these ranks only."""
        tag = zlib.crc32(name.encode()) % 32768
        # `Create_group` blocks without a deadline: first wait until all these ranks have called.
        nothing = bytearray(0)
        others = [rank for rank in ranks if rank != self.rank]
        requests = [self._setup.Irecv([nothing, MPI.BYTE], rank, tag) for rank in others]
        requests += [self._setup.Isend([nothing, MPI.BYTE], rank, tag) for rank in others]
        self.wait(
            self.launch(requests, nothing), f"new_group of ranks {list(ranks)}", self.timeout_s
        )
        chosen = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
        return self.data.Create_group(chosen, tag)

    def _receive_control(self) -> None:
        status = MPI.Status()
        while (message := self._control.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            text = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([text, MPI.BYTE])
            if status.Get_tag() == _GONE:
                self._gone.add(status.Get_source())
            else:
                self.failure = self.failure or text.decode(errors="replace")

    def _send_all(self, kind: int, text: bytes) -> None:
        others = (rank for rank in range(self.size) if rank != self.rank)
        requests = [self._control.Isend([text, MPI.BYTE], rank, kind) for rank in others]
        self.launch(requests, text)

    def _report_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, trace)
        self.fail(f"rank {self.rank} raised {kind.__name__}: {error}")

    def _leave(self) -> None:
        """End a failed job without MPI's finalisation, which would wait for the other ranks."""
        self._receive_control()
        if not self.failure:
            return  # mpi4py finalises
        # Flush first: once all ranks have sent _GONE, one of them kills the others.
        sys.stdout.flush()
        sys.stderr.flush()
        self._send_all(_GONE, b"")
        deadline_s = time.monotonic() + GOODBYE_S
        while len(self._gone) < self.size - 1 and time.monotonic() < deadline_s:
            self._receive_control()
            time.sleep(_PAUSE_MAX_S)
        # Finalising would wait for operations that never end.
        MPI.COMM_WORLD.Abort(1)
