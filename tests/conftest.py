"""Hooks and fixtures that apply to all tests."""

import faulthandler
import hashlib
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings

from shoal_client.membership import member
from shoal_proto.tls import identity

# An example has no deadline: it may take long while other tests run on the same machine.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

BEGUN_S = time.monotonic()
WITHIN_S = float(os.environ.get("SHOAL_TESTS_WITHIN_S", "0"))
"""Seconds after which no further test begins; 0: no limit. `make test-long` sets it."""
ORDER = os.environ.get("SHOAL_TESTS_ORDER", "")
"""A text that orders the files of tests: the day of the newest commit. So a limit leaves out other
files on another day."""
CRASHES: list[object] = []
AFTER_FAILURE_S = 120.0
"""Seconds that the fixtures of a failed test have to end."""

# A shell that starts the tests in the background makes them, and every process that they start,
# ignore SIGINT. Tests of Ctrl-C would then not work.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files by a hash of ORDER and their name."""

    def order(item: pytest.Item) -> bytes:
        return hashlib.sha256(f"{ORDER} {item.nodeid.partition('::')[0]}".encode()).digest()

    if ORDER:
        items.sort(key=order)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip the remaining tests once the time is over: the report of a slow machine names them."""
    if WITHIN_S and time.monotonic() - BEGUN_S > WITHIN_S:
        pytest.skip(f"not run: the {WITHIN_S:.0f} s for further combinations were over")


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Limit what a failed test still does: pytest and pytest-timeout stop their clocks once a test
    has failed, and a fixture that waits for a thread of that test would wait for ever."""
    if not isinstance(node, pytest.Item):
        return

    def interrupt(*_: object) -> None:
        faulthandler.dump_traceback(sys.__stderr__)
        pytest.fail(f"the fixtures of this test did not end within {AFTER_FAILURE_S:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    # Repeated, since an event loop drops what a signal raises in a callback.
    signal.setitimer(signal.ITIMER_REAL, AFTER_FAILURE_S, AFTER_FAILURE_S / 4)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Stop the clock of `pytest_exception_interact` once the test has ended."""
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(error: object) -> None:
    """Record that a process of pytest-xdist ended by itself: its remaining tests did not run."""
    if error:
        CRASHES.append(error)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process of pytest-xdist ended: some tests were not run, and a rerun of the
    failed tests would not show that."""
    if CRASHES:
        print(f"\na process that ran tests ended ({CRASHES[0]}): not all tests were run")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """A stack that is closed at the end of the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _own_certificate() -> Iterator[None]:
    """Restore the process' certificate: one that a test sets must not reach the next test."""
    own = identity.own()
    with identity.using(own.files if own is not None else None):
        yield


@pytest.fixture(autouse=True)
def _no_completed_jobs() -> None:
    """Forget jobs that earlier tests have trained to their end in this process: many have one
    name."""
    member._completed.clear()


@pytest.fixture(autouse=True)
def _own_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM, which a test, or a library that it uses, may replace."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and signal.getsignal(signal.SIGTERM) != handler:
        signal.signal(signal.SIGTERM, handler)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark the cases of a `sampled` test whose parameters all occurred in earlier cases as `long`,
    and every second of these as `nightly`.

    The hook sees all cases of the test, before pytest selects those to be run.
    """
    made = yield
    shown: set[tuple[str, ...]] = set()
    further = [pytest.mark.long, pytest.mark.nightly]
    for item in made if isinstance(made, list) else []:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("nightly"):
            continue
        params = item.callspec.params
        shows = {(name, repr(params[name])) for name in sampled.args} or {("",)}
        if shows <= shown:
            item.add_marker(further[0])
            further.reverse()
        shown |= shows
    return made
