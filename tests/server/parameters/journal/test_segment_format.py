"""Segments: a torn or damaged one has a prefix of the written entries, or is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_proto.errors import JournalDamaged
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.parameters.journal.config import START_BYTES
from shoal_server.parameters.journal.segment_format import JournalEntry, encode, scan, start
from shoal_server.parameters.shard.record import UpdateRecord

NUM_ENTRIES = 9
GROUP = 3
"""Number of entries that are synced together."""


def entry(number: int) -> JournalEntry:
    push = PushRecord(session="job/a#1", sequence=number, version=number + 1, lr=0.1)
    return JournalEntry("job", number % 4, 2, UpdateRecord(push, bytes([number]) * (number % 5)))


def segment() -> tuple[bytes, list[int]]:
    """Return the bytes of a segment, and the end of each entry in it. Groups were synced in
    turn."""
    data, ends = start(1), []
    for first in range(1, NUM_ENTRIES + 1, GROUP):
        synced_bytes = len(data)
        for number in range(first, first + GROUP):
            made = entry(number) if number != 5 else JournalEntry("job", 1, 0, None)
            data += encode(made, number, synced_bytes)
            ends.append(len(data))
    return data, ends


DATA, ENDS = segment()
LAST_GROUP = ENDS[NUM_ENTRIES - GROUP - 1]
WHOLE = scan(DATA, "whole", is_last=True)


def test_every_entry_is_read_with_its_number() -> None:
    assert WHOLE.first_number == 1 and WHOLE.num_bytes == len(DATA)
    assert [number for number, _ in WHOLE.entries] == list(range(1, NUM_ENTRIES + 1))
    assert [made for number, made in WHOLE.entries if number != 5] == [
        entry(number) for number in range(1, NUM_ENTRIES + 1) if number != 5
    ]
    assert WHOLE.entries[4][1] == JournalEntry("job", 1, 0, None)


def test_a_segment_cut_at_any_byte_has_the_whole_entries() -> None:
    for length in range(len(DATA)):
        found = scan(DATA[:length], "cut", is_last=True)
        whole = [end for end in (START_BYTES, *ENDS) if end <= length]
        assert found.entries == WHOLE.entries[: max(0, len(whole) - 1)], length
        assert found.num_bytes == max(whole, default=0), length


@pytest.mark.parametrize("length", [0, 5, START_BYTES + 1, *[end - 1 for end in ENDS]])
def test_a_cut_segment_before_others_is_damaged(length: int) -> None:
    with pytest.raises(JournalDamaged, match="early"):
        scan(DATA[:length], "early", is_last=False)


@pytest.mark.long
def test_any_flipped_bit_is_damage_or_the_torn_end_of_the_last_group() -> None:
    """Each bit is flipped in turn."""
    for bit in range(8 * len(DATA)):
        changed = bytearray(DATA)
        changed[bit // 8] ^= 1 << bit % 8
        # The number of the first entry is checked elsewhere, against the segment before.
        is_number = 8 <= bit // 8 < START_BYTES
        if bit // 8 < LAST_GROUP:
            with pytest.raises(JournalDamaged) as raised:
                scan(bytes(changed), "flipped", is_last=True)
            assert raised.value.details["file"] == "flipped"
            assert is_number or int(raised.value.details["offset"]) <= bit // 8
            continue
        found = scan(bytes(changed), "flipped", is_last=True)
        assert found.entries == WHOLE.entries[: len(found.entries)], bit
        assert NUM_ENTRIES - GROUP <= len(found.entries) < NUM_ENTRIES, bit
        with pytest.raises(JournalDamaged):
            scan(bytes(changed), "flipped", is_last=False)


@given(holes=st.lists(st.integers(LAST_GROUP, len(DATA) - 1), min_size=1, max_size=40))
def test_a_last_group_that_is_only_partly_on_disk_is_a_torn_end(holes: list[int]) -> None:
    changed = bytearray(DATA)
    for at in holes:
        changed[at] = 0
    found = scan(bytes(changed), "torn", is_last=True)
    assert found.entries == WHOLE.entries[: len(found.entries)]
    assert len(found.entries) >= NUM_ENTRIES - GROUP


@given(garbage=st.binary(max_size=200))
def test_garbage_after_the_end_is_ignored(garbage: bytes) -> None:
    found = scan(DATA + garbage, "garbage", is_last=True)
    assert found.entries == WHOLE.entries and found.num_bytes == len(DATA)


@given(data=st.binary(max_size=300))
def test_random_bytes_have_no_entries(data: bytes) -> None:
    assert scan(data, "other", is_last=True).entries == ()
