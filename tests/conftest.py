"""What holds for all tests."""

import hashlib
import os
import signal
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from shoal_proto.tls import identity

# How long an example takes is the machine's affair: beside other tests, any may take long.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

BEGUN_S = time.monotonic()
WITHIN_S = float(os.environ.get("SHOAL_TESTS_WITHIN_S", "0"))
"""Seconds after which no further test begins; 0: no limit. `make test-long` sets it."""
ORDER = os.environ.get("SHOAL_TESTS_ORDER", "")
"""A text that orders the files of tests, so that a limit leaves out other files for each commit."""
CRASHES: list[object] = []

# A shell that starts the tests in its background has them ignore Ctrl-C, and with them all that
# they start: what Ctrl-C does there could not be tested.
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
    """Skip the remaining tests once the time is over: a slow machine says what it left out."""
    if WITHIN_S and time.monotonic() - BEGUN_S > WITHIN_S:
        pytest.skip(f"not run: the {WITHIN_S:.0f} s for further combinations were over")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(error: object) -> None:
    """Note a process of pytest-xdist that ended by itself, and the tests that it was given."""
    if error:
        CRASHES.append(error)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for good after such an end: some tests were not run, and to run once more those
    that failed does not show it."""
    if CRASHES:
        print(f"\na process that ran tests ended ({CRASHES[0]}): not all tests were run")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(autouse=True)
def _own_certificate() -> Iterator[None]:
    """A process has one certificate: what a test takes for it is none of the next test's."""
    own = identity.own()
    with identity.using(own.files if own is not None else None):
        yield


@pytest.fixture(autouse=True)
def _own_sigterm() -> Iterator[None]:
    """As with a handler that it, or a library within it, leaves for SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and signal.getsignal(signal.SIGTERM) != handler:
        signal.signal(signal.SIGTERM, handler)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Mark as `long` the cases of a `sampled` test that show nothing which one before did not, and
    every second of these as `nightly`.

    Of all cases that the test has, however few of them are then picked to be run.
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
