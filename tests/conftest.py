"""What holds for all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from shoal_proto.tls import identity

# How long an example takes is the machine's affair: beside other tests, any may take long.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.fixture(autouse=True)
def _own_certificate() -> Iterator[None]:
    """A process has one certificate: what a test takes for it is none of the next test's."""
    own = identity.own()
    with identity.using(own.files if own is not None else None):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` the cases of a `sampled` test that show nothing which one before did not."""
    shown: set[tuple[str, ...]] = set()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("nightly"):
            continue
        test = item.nodeid.partition("[")[0]
        params = item.callspec.params  # type: ignore[attr-defined]
        shows = {(test, name, repr(params[name])) for name in sampled.args} or {(test,)}
        if shows <= shown:
            item.add_marker(pytest.mark.long)
        shown |= shows
