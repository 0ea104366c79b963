"""The program of a relay that halts in the middle of a segment.

Its arguments are the address of a coordinator and a series. Prints a line once it has verified two
chunks, and then waits forever.
"""

import ctypes
import signal
import sys
import threading

from shoal_client.weights.reader import SeriesReader
from shoal_proto.segments.transfer import StagedSegment


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the test
    verify, for_ever = StagedSegment.verify, threading.Event()

    def halting(self: StagedSegment, index: int, chunk: memoryview) -> None:
        verify(self, index, chunk)
        if index == 1:
            print("two chunks", flush=True)
            for_ever.wait()

    StagedSegment.verify = halting  # type: ignore[method-assign]
    coordinator, series = sys.argv[1:]
    reader = SeriesReader(
        [coordinator], series, "halting", may_be_local=False, relay_at="127.0.0.1"
    )
    reader.fetch(reader.wait(0, 60.0))


if __name__ == "__main__":
    main()
