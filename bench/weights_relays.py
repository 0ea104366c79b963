"""Relaying readers of bench/weights.py: many in one process, without torch.

Arguments: address of a coordinator, series, name, number of readers. Prints "report ready", and for
each reader and version "report done", the number of the version, the time at which it was verified,
and the bytes that servers sent. Each relay sends to each of the two readers that fetch from it at
half the rate of a link, as if it had a network of its own.
"""

import os
import sys
import threading
import time
import traceback
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import structlog

from shoal_client.weights import relay
from shoal_client.weights.reader import SeriesReader

LINK_BYTES_PER_S = 40e6
CHILDREN = 2
printing = threading.Lock()


class PacedWire(relay._Wire):
    """A connection of a relay, with its share of the link."""

    def send_part(self, descriptor: int, start: int, num_bytes: int) -> None:
        time.sleep(num_bytes * CHILDREN / LINK_BYTES_PER_S)
        super().send_part(descriptor, start, num_bytes)


def follow(reader: SeriesReader) -> None:
    before = 0
    while True:
        record = reader.wait(reader.installed)
        for segment in reader.fetch(record):
            segment.close()
        done_s = time.monotonic()
        reader.report(record.number, record.digest)
        from_servers = reader.fetched_bytes - reader.relayed_bytes
        line = f"report done {record.number} {done_s} {from_servers - before}\n"
        with printing:
            print(line, end="", flush=True)
        before = from_servers


def main() -> None:
    # Logs go to standard error: on standard output, a log line of another thread could merge with
    # a report.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    coordinator, series, name, count = sys.argv[1:]
    relay._Wire = PacedWire  # type: ignore[misc]
    readers = [
        SeriesReader([coordinator], series, f"{name}-{i}", may_be_local=False, relay_at="127.0.0.1")
        for i in range(int(count))
    ]
    for each in readers:
        each.view()
    print("report ready", flush=True)
    with ThreadPoolExecutor(len(readers)) as pool:
        calls = [pool.submit(follow, each) for each in readers]
        for call in wait(calls, return_when=FIRST_EXCEPTION).done:
            traceback.print_exception(call.exception())
        # The other readers never end. The bench notices that this process has ended.
        os._exit(1)


if __name__ == "__main__":
    main()
