"""The newest output of a worker, which is read in parts."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_client.host.output_tail import SLACK_BYTES, OutputTail
from shoal_proto.v1.outputs_pb2 import OutputPart


def filled(*lines: str, max_bytes: int = 1 << 20) -> OutputTail:
    tail = OutputTail(max_bytes)
    for line in lines:
        tail.add(line)
    return tail


def test_a_part_has_the_newest_whole_lines() -> None:
    tail = filled("one", "two", "three")
    assert tail.part(100) == OutputPart(data=b"one\ntwo\nthree\n", start=0, stop=14, oldest=0)
    assert tail.part(11).data == b"two\nthree\n"
    assert tail.part(9).data == b"three\n"


def test_parts_before_and_after_a_position_have_no_gap() -> None:
    tail = filled("one", "two", "three")
    newest = tail.part(6)
    before = tail.part(5, before=newest.start)
    assert (before.data, before.stop) == (b"two\n", newest.start)
    assert tail.part(5, before=before.start).data == b"one\n"
    tail.add("four")
    after = tail.part(100, after=newest.stop)
    assert (after.data, after.start) == (b"four\n", newest.stop)
    assert tail.part(100, after=after.stop).data == b""
    assert tail.part(9, after=0).data == b"one\ntwo\n"


def test_the_memory_of_the_output_is_bounded() -> None:
    """A read from a discarded position begins with the oldest kept line, and shows its position."""
    tail = filled(max_bytes=1000)
    for number in range(50_000):
        tail.add(f"line {number}")
    kept = tail.part(1 << 20)
    assert 1000 - 12 <= len(kept.data) <= 1000 + SLACK_BYTES
    assert kept.data.endswith(b"line 49999\n") and kept.data.startswith(b"line ")
    assert kept.oldest == kept.start > 0
    late = tail.part(100, after=3)
    assert late.start == kept.oldest and kept.data.startswith(late.data)


def test_a_line_longer_than_a_part_is_read_in_pieces() -> None:
    tail = filled("x" * 30, "short")
    whole, position = b"", 0
    while (part := tail.part(8, after=position)).data:
        whole, position = whole + part.data, part.stop
    assert whole == b"x" * 30 + b"\nshort\n"


def test_invalid_text_is_kept_with_a_replacement() -> None:
    assert filled("a\ud800b").part(100).data == b"a?b\n"


@given(
    st.lists(st.text("ab", max_size=12), max_size=30),
    st.integers(1, 40),
    st.integers(0, 400),
)
def test_parts_of_both_directions_are_the_output(
    lines: list[str], most: int, position: int
) -> None:
    """Parts before and after any position have each byte once."""
    tail, text = filled(*lines), "".join(f"{line}\n" for line in lines).encode()
    position = min(position, len(text))
    up, at = b"", position
    while (part := tail.part(most, after=at)).data:
        assert part.start == at and len(part.data) <= most
        up, at = up + part.data, part.stop
    down, at = b"", position
    while (part := tail.part(most, before=at)).data:
        assert part.stop == at and len(part.data) <= most
        down, at = part.data + down, part.start
    assert down + up == text
