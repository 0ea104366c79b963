"""Rows over bulk connections: a server's answers to correct and to bad frames."""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.clusters.bulk_frames import RawConnection, bulk_offer
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.bulk import bulk_transport
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_proto import MAX_PIECE_BYTES, bulk
from shoal_proto.bulk import HEADER_BYTES, FrameKind
from shoal_proto.checksum import crc32
from shoal_proto.errors import (
    ChecksumMismatch,
    Fenced,
    MalformedMessage,
    ShapeMismatch,
    WrongEpoch,
)
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    FoundRows,
    LookupHeader,
    LookupItem,
    LookupReply,
    LookupRequest,
    Piece,
    PushedRows,
    PushHeader,
    PushItem,
    PushOutcome,
    PushReply,
    PushRequest,
)
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec

DIM = 4
TABLE = TableSpec(
    name="t",
    dim=DIM,
    dtype="float32",
    initialiser=Initialiser(kind="constant", center=1.0),
    optimizer=RowOptimizer(kind="sgd", lr=1.0),
    num_shards=1,
)
IDS = struct.pack("<3q", 1, 2, 3)
ROWS = IDS + bytes(24) + struct.pack("<12f", *[-1.0] * 12)
"""Ids, births and gradients of three rows, as they follow a push."""
END = bulk.header(FrameKind.END)


class Small:
    """A server with a table of one shard, and its client."""

    def __init__(self, servers: ParameterServers, token: Token, client: TableClient) -> None:
        self.servers = servers
        self.token = token
        self.client = client
        self.where = (TABLE.name, 0)
        (self.shard_id,) = client.shard_ids([self.where])

    def opened(self) -> RawConnection:
        return RawConnection.admitted(bulk_offer(self.servers, self.token))

    def pushing(self, *, num_rows: int = 3, epoch: int = 1, token: Token | None = None) -> bytes:
        rows = PushedRows(num_rows=num_rows)
        header = PushHeader(
            token=token or self.token,
            sequence=1,
            shards=[PushItem(shard_id=self.shard_id, epoch=epoch, base_version=1, rows=rows)],
            all_shard_ids=[self.shard_id],
            counts_rows=True,
        )
        return bulk.message(FrameKind.PUSH, PushRequest(header=header).SerializeToString())

    def asking(self, *num_rows: int, token: Token | None = None) -> bytes:
        items = [LookupItem(shard_id=self.shard_id, epoch=1, num_rows=n) for n in num_rows]
        header = LookupHeader(token=token or self.token, items=items)
        return bulk.message(FrameKind.LOOKUP, LookupRequest(header=header).SerializeToString())

    def piece(self, data: bytes, *, offset: int = 0, checksum: int | None = None) -> bytes:
        checksum = crc32(data) if checksum is None else checksum
        return _piece(self.shard_id, data, offset=offset, checksum=checksum)

    def values(self) -> list[float]:
        """Return the values of the first row."""
        rows = self.client.look_up({self.where: IDS[:8]})[self.where]
        return list(struct.unpack("<4f", rows.values))


def _piece(part: int, data: bytes, *, offset: int = 0, checksum: int | None = None) -> bytes:
    checksum = crc32(data) if checksum is None else checksum
    head = bulk.header(
        FrameKind.PIECE, shard_id=part, offset_bytes=offset, num_bytes=len(data), checksum=checksum
    )
    return head + data


served = servers_fixture(1, "module")


@pytest.fixture
def small(served: ParameterServers, request: pytest.FixtureRequest) -> Iterator[Small]:
    """Make a job for the test on the shared server."""
    token = served.admit("w0", job=f"job-{abs(hash(request.node.name))}")
    with (
        closing(ParameterClient([served.coordinator], lambda: token)) as parameters,
        closing(TableClient([served.coordinator], lambda: token, transport="grpc")) as client,
    ):
        parameters.place([], [TABLE])
        client.fetch_map()
        client.look_up({("t", 0): b""})
        yield Small(served, token, client)


def outcome_of(raw: RawConnection) -> PushOutcome:
    frame = raw.next()
    assert frame is not None
    assert frame.kind is FrameKind.MESSAGE
    (outcome,) = PushReply.FromString(bytes(frame.body)).outcomes
    return outcome


def found_by(raw: RawConnection) -> list[FoundRows]:
    frame = raw.next()
    assert frame is not None
    assert frame.kind is FrameKind.MESSAGE
    return list(LookupReply.FromString(bytes(frame.body)).rows)


@pytest.mark.parametrize("cut_at", [len(ROWS), 8, 40])
def test_a_push_of_correct_frames_is_applied_once(small: Small, cut_at: int) -> None:
    """The rows are in one piece, or in two that are cut anywhere."""
    raw = small.opened()
    pieces = [small.piece(ROWS[:cut_at])]
    if cut_at < len(ROWS):
        pieces.append(small.piece(ROWS[cut_at:], offset=cut_at))
    raw.send(small.pushing(), *pieces, END)
    outcome = outcome_of(raw)
    assert not outcome.HasField("error")
    assert outcome.version == 2
    end = raw.next()
    assert end is not None
    assert end.kind is FrameKind.END
    assert small.values() == [2.0] * DIM
    # The same push again is a duplicate.
    raw.send(small.pushing(), small.piece(ROWS), END)
    assert outcome_of(raw).duplicate
    assert small.values() == [2.0] * DIM


def test_a_lookup_answers_each_item(small: Small) -> None:
    """Answers have the number of their item, as several items may be of one shard."""
    raw = small.opened()
    raw.send(small.asking(2, 1), _piece(0, IDS[:16]), _piece(1, IDS[16:]), END)
    seen: dict[int, bytes] = {}
    announced: dict[int, int] = {}
    while (frame := raw.next()) is not None and frame.kind is not FrameKind.END:
        if frame.kind is FrameKind.MESSAGE:
            for rows in LookupReply.FromString(bytes(frame.body)).rows:
                announced[rows.item] = rows.num_bytes
        else:
            assert crc32(frame.body) == frame.checksum or frame.offset_bytes
            seen[frame.shard_id] = seen.get(frame.shard_id, b"") + bytes(frame.body)
    row = bytes(8) + struct.pack("<4f", *[1.0] * 4)
    assert announced == {0: 2 * len(row), 1: len(row)}
    assert seen == {0: bytes(16) + row[8:] * 2, 1: row}


@pytest.mark.parametrize("cut_bytes", [1, HEADER_BYTES + 10, HEADER_BYTES + len(ROWS) - 1])
def test_a_push_that_is_cut_off_changes_nothing(small: Small, cut_bytes: int) -> None:
    raw = small.opened()
    raw.send(small.pushing(), small.piece(ROWS)[:cut_bytes])
    raw.socket.shutdown(socket.SHUT_WR)
    while (frame := raw.next()) is not None:
        assert frame.kind is not FrameKind.MESSAGE
    assert small.values() == [1.0] * DIM


WRONG_PUSHES = {
    "changed": (3, [(ROWS, 0, 7)], ChecksumMismatch, "changed in transit"),
    "too long": (3, [(ROWS + bytes(4), 0, None)], ShapeMismatch, "more bytes"),
    "too short": (3, [(ROWS[:-4], 0, None)], ShapeMismatch, "ended within"),
    "fewer rows than announced": (4, [(ROWS, 0, None)], ShapeMismatch, "ended within"),
    "not the next": (3, [(ROWS[8:], 8, None)], MalformedMessage, "not the next piece"),
}


@pytest.mark.parametrize("name", WRONG_PUSHES)
def test_rows_that_are_not_as_announced_are_refused(small: Small, name: str) -> None:
    num_rows, pieces, kind, words = WRONG_PUSHES[name]
    raw = small.opened()
    raw.send(
        small.pushing(num_rows=num_rows),
        *(small.piece(data, offset=offset, checksum=check) for data, offset, check in pieces),
        END,
    )
    error = from_detail(outcome_of(raw).error)
    assert isinstance(error, kind)
    assert words in str(error)
    assert small.values() == [1.0] * DIM


def test_a_push_to_another_epoch_is_refused_before_its_rows_arrive(small: Small) -> None:
    raw = small.opened()
    raw.send(small.pushing(epoch=9))
    assert isinstance(from_detail(outcome_of(raw).error), WrongEpoch)
    raw.send(small.piece(ROWS), END)
    end = raw.next()
    assert end is not None
    assert end.kind is FrameKind.END
    assert small.values() == [1.0] * DIM


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (bulk.header(FrameKind.PLACED, num_bytes=len(ROWS)), "shared memory"),
        (bulk.header(FrameKind.BEAT), "does not belong"),
        (bulk.header(FrameKind.PIECE, num_bytes=MAX_PIECE_BYTES + 1), "too large"),
        (_piece(77, ROWS), "unexpected piece"),
    ],
)
def test_frames_that_no_client_sends_end_the_call(small: Small, frame: bytes, words: str) -> None:
    raw = small.opened()
    raw.send(small.pushing(), frame, END)
    error = raw.error()
    assert isinstance(error, MalformedMessage)
    assert words in str(error)
    assert raw.next() is None
    assert small.values() == [1.0] * DIM


def test_a_call_that_begins_with_a_piece_is_refused(small: Small) -> None:
    raw = small.opened()
    request = LookupRequest(piece=Piece(data=IDS))
    raw.send(bulk.message(FrameKind.LOOKUP, request.SerializeToString()), END)
    assert isinstance(raw.error(), MalformedMessage)


@pytest.mark.parametrize("kind", [FrameKind.PUSH, FrameKind.LOOKUP])
def test_a_call_that_does_not_parse_is_refused(small: Small, kind: FrameKind) -> None:
    raw = small.opened()
    raw.send(bulk.message(kind, b"\xff\xff"))
    assert "does not parse" in str(raw.error())


@pytest.mark.parametrize("is_push", [True, False])
def test_a_members_connection_does_not_replace_a_token(small: Small, *, is_push: bool) -> None:
    """Each call has its member's token, which is checked."""
    stranger = Token(job=small.token.job, generation=1, member_id="w9", incarnation="none")
    raw = small.opened()
    if is_push:
        raw.send(small.pushing(token=stranger), small.piece(ROWS), END)
    else:
        raw.send(small.asking(3, token=stranger), _piece(0, IDS), END)
    assert isinstance(raw.error(), Fenced)
    assert small.values() == [1.0] * DIM


def test_a_lookup_of_too_many_rows_is_refused(small: Small) -> None:
    raw = small.opened()
    raw.send(small.asking(10_000_000))
    (rows,) = found_by(raw)
    assert "too many rows" in str(from_detail(rows.error))


def test_an_error_of_one_item_does_not_affect_others(small: Small) -> None:
    """The ids of the first item are truncated."""
    raw = small.opened()
    raw.send(small.asking(1, 1), _piece(0, IDS[:4]), _piece(1, IDS[:8]), END)
    answers = []
    while (frame := raw.next()) is not None and frame.kind is not FrameKind.END:
        if frame.kind is FrameKind.MESSAGE:
            answers += LookupReply.FromString(bytes(frame.body)).rows
    errors = {rows.item: rows.HasField("error") for rows in answers}
    assert errors == {0: True, 1: False}


def test_without_a_bulk_connection_rows_are_sent_over_grpc(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_transport, "connect", lambda *arguments: None)
    with closing(TableClient([small.servers.coordinator], lambda: small.token)) as client:
        client.fetch_map()
        rows = client.look_up({small.where: IDS})[small.where]
        client.push(
            {
                small.where: Gradients(
                    ids=IDS,
                    births=rows.births,
                    gradients=ROWS[48:],
                    base_version=rows.version,
                    base_epoch=rows.epoch,
                )
            }
        )
        assert set(client.transports.values()) == {"grpc"}
    assert small.values() == [2.0] * DIM


def test_shared_memory_grows_with_the_number_of_rows(small: Small) -> None:
    """All rows arrive in steps with more or fewer rows, also after one without any."""
    with closing(
        TableClient([small.servers.coordinator], lambda: small.token, transport="auto")
    ) as client:
        client.fetch_map()
        for num_rows in (0, 10, 3_000, 200_000, 10, 0):
            ids = struct.pack(f"<{num_rows}q", *range(num_rows))
            rows = client.look_up({small.where: ids})[small.where]
            assert rows.values == struct.pack("<f", 1.0) * (DIM * num_rows)
            assert set(client.transports.values()) == {"shared-memory"}
