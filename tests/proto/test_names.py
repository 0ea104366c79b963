"""The rule for names, which stands twice: the core of the server imports nothing."""

import pytest

from shoal_proto import names
from shoal_server.core import names as core


@pytest.mark.parametrize(
    "text", ["a", "my-run_1.x", "", "my run", ".a", "-a", "a/b", "\u00e9", "x" * 128, "x" * 129]
)
def test_who_asks_refuses_what_the_coordinator_would(text: str) -> None:
    """So that nothing is started for a name that is refused then."""
    assert names.is_name(text) == core.is_name(text)
    assert names.NAME_RULE == core.NAME_RULE
