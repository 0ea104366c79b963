"""Resources of snapshot tests, closed at their end."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
