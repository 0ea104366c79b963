"""What holds for all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is the machine's affair: beside other tests, any may take long.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")

TESTS = Path(__file__).parent
ALONE = [TESTS / "e2e", TESTS / "faults", TESTS / "worker" / "launcher"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as `alone` what starts many processes, of which some must be heard in time."""
    in_folder = any(item.path.is_relative_to(folder) for folder in ALONE)
    if in_folder or "cluster" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.alone)
