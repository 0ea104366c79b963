"""Lines printed by a worker, as readers elsewhere see them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_proto.terminal import plain_lines

CASES = [
    (b"", []),
    (b"one\ntwo\n", ["one", "two"]),
    (b"one\n\ntwo", ["one", "", "two"]),
    (b"\x1b[1;31mred\x1b[0m and \x1b[4munderlined\x1b[24m\n", ["red and underlined"]),
    (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["textlink"]),
    (b"\x1bP+q544e\x1b\\shown\x1b(B\x1b=\x1b7\n", ["shown"]),
    (b" 10%\r 20%\r 30%\r\n", [" 30%"]),
    (b"caf\xc3\xa9 \xff\n", ["café �"]),
    (b"a\x08b\x00\tc\n", ["a\\x08b\\x00\tc"]),
    (b"cut off \x1b", ["cut off "]),
    ("marks \u202e of direction\n".encode(), ["marks \\u202e of direction"]),
]


@pytest.mark.parametrize(("data", "lines"), CASES)
def test_only_text_without_terminal_sequences_remains(data: bytes, lines: list[str]) -> None:
    assert plain_lines(data) == lines


@given(st.lists(st.sampled_from([b"\x1b", b"[", b"]", b"31", b"m", b"\x07", b"\r", b"\n", b"P"])))
def test_no_escape_character_remains(parts: list[bytes]) -> None:
    text = "\n".join(plain_lines(b"".join(parts)))
    assert not set(text) & {"\x1b", "\x07", "\r"}
