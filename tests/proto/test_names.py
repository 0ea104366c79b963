"""Valid names of jobs, members and servers."""

import pytest

from shoal_proto.names import is_name


@pytest.mark.parametrize("text", ["a", "my-run_1.x", "_a", "9", "x" * 128])
def test_valid_names_are_accepted(text: str) -> None:
    """Names of letters, digits and a few signs are valid in keys, paths and URLs."""
    assert is_name(text)


@pytest.mark.parametrize("text", ["", "my run", ".a", "-a", "a/b", "\u00e9", "a\n", "x" * 129])
def test_invalid_names_are_refused(text: str) -> None:
    """Texts that would be another key, a hidden file or an option, or that are too long."""
    assert not is_name(text)
