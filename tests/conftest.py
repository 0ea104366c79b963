"""What holds for all tests."""

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair: beside other tests, any may take long.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


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
