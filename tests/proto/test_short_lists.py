"""Lists of names in messages."""

import pytest

from shoal_proto.short_lists import short_list


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("ab", "a, b"),
        ("abc", "a, b and 1 more"),
        ("abcde", "a, b and 3 more"),
    ],
)
def test_names_beyond_the_limit_are_counted(names: str, text: str) -> None:
    assert short_list(names, 2) == text
    assert short_list(iter(names), 2) == text


def test_of_a_known_number_of_names_no_more_than_the_limit_are_read() -> None:
    """A list of thousands of names costs no more than the part that is shown."""
    names = iter("abcde")
    assert short_list(names, 2, 5) == "a, b and 3 more"
    assert next(names) == "c"
