"""What a call sends of its parts, where no memory is shared."""

import socket

import pytest

from shoal_client.bulk.sending import PIECE_BYTES, Sending
from shoal_client.shards.parts import Part, in_pieces
from shoal_proto.bulk import Frame, FrameReader, Kind
from shoal_proto.checksum import verify
from shoal_server.core.shards.placement import TARGET_SHARD_BYTES

OPENING = b""


def sent(num_bytes: int) -> list[Frame]:
    """The frames of a call with one part of so many bytes, up to its end."""
    data = memoryview(bytes(range(256)) * (num_bytes // 256))
    part = Part(shard_id=1, num_bytes=num_bytes, pieces=in_pieces([data]))
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    frames: list[Frame] = []
    with ours, theirs:
        ours.setblocking(False)
        sending = Sending(ours, OPENING, [part], None)
        while not frames or frames[-1].kind is not Kind.END:
            sending.go_on()
            reader.received(theirs.recv_into(reader.space()))
            while (frame := reader.next()) is not None:
                frames.append(frame)
    return frames


@pytest.mark.parametrize(
    ("num_bytes", "num_pieces"), [(TARGET_SHARD_BYTES, 1), (2 * PIECE_BYTES + 256, 3)]
)
def test_a_shard_of_the_usual_size_goes_in_one_piece(num_bytes: int, num_pieces: int) -> None:
    """So the server has nothing to join."""
    *pieces, _ = sent(num_bytes)
    assert [frame.kind for frame in pieces] == [Kind.PIECE] * num_pieces
    assert sum(frame.num_bytes for frame in pieces) == num_bytes
    for frame in pieces:
        verify("a piece", frame.checksum, frame.body)
