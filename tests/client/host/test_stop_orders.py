"""Waits of a main thread for the next event or signal."""

import queue
import signal
import subprocess
import sys

import pytest

from shoal_client.host.stop_orders import next_of

MISSED = """
import queue, signal, threading
from shoal_client.host.stop_orders import StopOrders, next_of

entries = queue.SimpleQueue()
waits = threading.Event()

def send():
    waits.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

class Waiting(queue.SimpleQueue):
    def get(self, *args, **options):
        waits.set()
        return super().get(*args, **options)

entries = Waiting()
threading.Thread(target=send).start()
with StopOrders().received(entries.put):
    print(next_of(entries))
"""


def test_a_signal_that_does_not_end_a_wait_is_handled_all_the_same() -> None:
    """Another thread receives it, so that the wait of the main thread is not interrupted. The same
    happens with a signal that arrives just before the wait."""
    command = [sys.executable, "-c", MISSED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=True)
    assert ended.stdout == f"{int(signal.SIGTERM)}\n"


def test_the_limit_of_a_wait_is_kept() -> None:
    entries: queue.SimpleQueue[int] = queue.SimpleQueue()
    with pytest.raises(queue.Empty):
        next_of(entries, 0.01)
    with pytest.raises(queue.Empty):
        next_of(entries, -1.0)
    entries.put(1)
    assert next_of(entries, 0.0) == 1
