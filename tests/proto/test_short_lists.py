"""Lists of names in messages, and texts that messages can hold."""

import os

import pytest

from shoal_proto.short_lists import sendable, short_list
from shoal_proto.v1.membership_pb2 import LeaveRequest


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


def test_a_text_with_bytes_that_are_not_utf8_can_be_sent() -> None:
    """Such bytes come from names of files, as lone surrogates."""
    text = os.fsdecode(b"no such data: /data/caf\xe9")
    sent = sendable(text)
    assert LeaveRequest(reason=sent).reason == r"no such data: /data/caf\udce9"
    assert sendable(sent) == sent, "the text is the same at a second call"
    assert sendable(text, 22) == r"no such data: /data/ca"
    assert sendable("é") == "é"
