"""A test that waits in vain for a process reports what that process does."""

import threading

import pytest
from support.processes.ranks import Ranks, Report


def _wait_for_nobody(report: Report) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, name="beside", daemon=True).start()
    report("waits")
    lock.acquire()


@pytest.mark.long
def test_a_process_that_does_not_end_is_reported_with_its_stacks() -> None:
    """The report shows the stacks of all its threads, from Python and from the kernel."""
    with Ranks() as ranks:
        rank = ranks.start(_wait_for_nobody)
        rank.expect("waits")
        with pytest.raises(AssertionError, match="_wait_for_nobody") as ended:
            rank.join(timeout_s=0.1)
        with pytest.raises(AssertionError, match="_wait_for_nobody"):
            rank.expect("ends", timeout_s=0.1)
    text = str(ended.value)
    assert "still running after 0.1 s" in text
    assert text.count("Thread 0x") + text.count("Current thread") > 1, text
    assert "futex" in text, text
