"""A client's view of tables on two servers: rows by id, updated once, even across a failover."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.clusters.parameter_servers import ParameterServers, servers_fixture

from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import (
    ITEM_BYTES,
    AskedRows,
    Gradients,
    Rows,
    TablePushResult,
    Where,
    received,
    route,
)
from shoal_client.parameters.tables import TableClient
from shoal_proto.errors import (
    Fenced,
    InvalidSpec,
    MalformedMessage,
    NonFiniteGradient,
    ProposalConflict,
    ShapeMismatch,
    StateLost,
    UnknownShard,
    UnsupportedOptimizer,
)
from shoal_proto.pieces import OnlyPiece, ReadPiece
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import FoundRows, LookupReply
from shoal_proto.v1.tables_pb2 import (
    Admission,
    Eviction,
    Initialiser,
    RowFate,
    RowOptimizer,
    TableSpec,
)
from shoal_server.parameters.journal.config import JournalConfig

DURABLE = Acknowledgement.ACKNOWLEDGEMENT_DURABLE
DIM = 4
NUM_SHARDS = 8


def table(name: str = "users", **changes: object) -> TableSpec:
    fields: dict[str, object] = {
        "name": name,
        "dim": DIM,
        "dtype": "float32",
        "seed": 3,
        "initialiser": Initialiser(kind="constant", center=1.0),
        "optimizer": RowOptimizer(kind="sgd", lr=0.5),
        "num_shards": NUM_SHARDS,
    }
    return TableSpec(**(fields | changes))  # type: ignore[arg-type]


servers = servers_fixture(2)


class Member:
    """A client with one or more tables, used with lists of numbers."""

    def __init__(
        self,
        servers: ParameterServers,
        token: Token,
        *tables: TableSpec,
        timeout_s: float = 20.0,
        level: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT,
        transport: str | None = None,
    ) -> None:
        self.parameters = ParameterClient([servers.coordinator], lambda: token)
        self.parameters.place([], tables)
        self.client = TableClient(
            [servers.coordinator],
            lambda: token,
            timeout_s=timeout_s,
            acknowledgement=level,
            transport=transport,
        )
        self.map = self.client.fetch_map()
        self.dim = tables[0].dim
        self.found: dict[Where, Rows] = {}
        self.ids: dict[Where, array[int]] = {}

    def look_up(self, ids: Sequence[int], name: str = "users") -> dict[int, list[float]]:
        """Look the ids up, and return the values by id."""
        self.ids = {(name, i): ids_of for i, ids_of in route(ids, NUM_SHARDS).items()}
        self.found = self.client.look_up({w: i.tobytes() for w, i in self.ids.items()})
        values = {}
        for where, rows in self.found.items():
            flat = array("f", rows.values)
            for place, row_id in enumerate(self.ids[where]):
                values[row_id] = flat[place * self.dim : (place + 1) * self.dim].tolist()
        return values

    def push(self, gradient: float) -> TablePushResult:
        """Push the same gradient for every element of the rows that were looked up last."""
        return self.client.push(
            {
                where: Gradients(
                    ids=ids.tobytes(),
                    births=self.found[where].births,
                    gradients=array("f", [gradient] * (self.dim * len(ids))).tobytes(),
                    base_version=self.found[where].version,
                    base_epoch=self.found[where].epoch,
                )
                for where, ids in self.ids.items()
            }
        )

    def close(self) -> None:
        self.parameters.close()
        self.client.close()


WAYS = {"auto": "shared-memory", "tcp": "tcp", "grpc": "grpc"}
by_every_way = pytest.mark.parametrize("transport", WAYS)


@pytest.mark.sampled()
@by_every_way
def test_rows_are_looked_up_and_trained(servers: ParameterServers, transport: str) -> None:
    """A row has its initial values until a push; others see the push; both servers hold a part."""
    member = Member(servers, servers.admit("w0"), table(), transport=transport)
    other = Member(servers, servers.admit("w1"), table())
    assert {shard.server_id for shard in member.map.shards} == {"ps-0", "ps-1"}
    ids = [*range(-20, 100), 2**63 - 1, -(2**63)]
    assert member.look_up(ids) == {i: [1.0] * DIM for i in ids}
    assert {b for rows in member.found.values() for b in array("Q", rows.births)} == {0}
    result = member.push(-1.0)
    made = bytes([RowFate.ROW_FATE_MADE])
    assert result.fates == {where: made * len(i) for where, i in member.ids.items()}
    assert other.look_up([5, 500]) == {5: [1.5] * DIM, 500: [1.0] * DIM}
    other.push(2.0)
    assert member.look_up([5, 500, 6]) == {5: [0.5] * DIM, 500: [0.0] * DIM, 6: [1.5] * DIM}
    assert set(member.client.transports.values()) == {WAYS[transport]}
    assert len(member.client.transports) == 2
    member.close()
    other.close()


@pytest.mark.long
@pytest.mark.sampled()
@by_every_way
def test_many_rows_are_looked_up_as_several_items(
    servers: ParameterServers, transport: str
) -> None:
    """An item of a lookup has a bound; look-ups and pushes have none."""
    member = Member(servers, servers.admit("w0"), table(dim=1024), transport=transport)
    before, after = [1.0] * 1024, [0.5] * 1024
    ids = range(3000)
    assert set(map(tuple, member.look_up(ids).values())) == {tuple(before)}
    assert max(len(rows.values) for rows in member.found.values()) > ITEM_BYTES
    assert member.push(1.0).retries == 0
    assert member.look_up([0, 1500, 2999, 3000]) == {
        0: after,
        1500: after,
        2999: after,
        3000: before,
    }
    member.close()


@pytest.mark.sampled()
@by_every_way
def test_a_killed_server_loses_no_row(servers: ParameterServers, transport: str) -> None:
    """Rows pushed earlier exist after the failover, and further pushes each count once."""
    member = Member(servers, servers.admit("w0"), table(), transport=transport)
    ids = list(range(100))
    member.look_up(ids)
    member.push(-1.0)
    member.look_up(ids)
    servers.stop("ps-1")
    result = member.push(-1.0)
    assert set(result.versions.values()) == {3}
    assert member.look_up(ids) == {i: [2.0] * DIM for i in ids}
    member.close()


def test_more_bytes_than_were_announced_are_malformed() -> None:
    asked = AskedRows(shard_id=0, epoch=1, ids=bytes(8), row_bytes=4)
    answer = [
        LookupReply(rows=[FoundRows(item=0, num_bytes=asked.answer_bytes)]),
        OnlyPiece(ReadPiece(0, 0, memoryview(bytes(asked.answer_bytes + 1)), None)),
    ]
    with pytest.raises(MalformedMessage, match="more than the 12 bytes"):
        list(received([asked], answer))


def test_lost_rows_are_an_error() -> None:
    """The only server comes back without its rows, and no row starts over."""
    with ParameterServers(1) as servers:
        member = Member(servers, servers.admit("w0"), table(), timeout_s=8.0)
        member.look_up([1])
        member.push(-1.0)
        servers.stop("ps-0")
        servers.add("ps-0")
        with pytest.raises(StateLost, match="was lost with every server that had it") as lost:
            member.look_up([1])
        details = lost.value.details
        assert (details["table"], details["version"]) == ("users", "2")
        member.close()


def test_rows_are_durable_only_on_servers_with_a_journal(
    servers: ParameterServers, tmp_path: Path
) -> None:
    """A push for durable rows is refused by a server without a journal, and changes nothing."""
    member = Member(servers, servers.admit("w0"), table(), level=DURABLE)
    member.look_up([1])
    with pytest.raises(InvalidSpec, match="--journal"):
        member.push(-1.0)
    assert member.look_up([1]) == {1: [1.0] * DIM}
    member.close()
    with ParameterServers(1, journal=JournalConfig(directory=tmp_path)) as others:
        member = Member(others, others.admit("w0"), table(), level=DURABLE)
        member.look_up([1])
        member.push(-1.0)
        assert member.look_up([1]) == {1: [1.5] * DIM}
        member.close()


def test_an_id_is_a_different_row_in_each_table(servers: ParameterServers) -> None:
    """One push may change both tables."""
    member = Member(servers, servers.admit("w0"), table(), table("items"))
    member.look_up([1, 2])
    member.push(-1.0)
    assert member.look_up([1, 2], "items") == {1: [1.0] * DIM, 2: [1.0] * DIM}
    with pytest.raises(UnknownShard, match="items, users"):
        member.client.look_up({("others", 0): b""})
    member.close()


@pytest.mark.sampled()
@by_every_way
def test_wrong_pushes_change_no_row(servers: ParameterServers, transport: str) -> None:
    """NaN, rows of other shards and wrong lengths each give an error that names the fault."""
    member = Member(servers, servers.admit("w0"), table(), transport=transport)
    member.look_up([7])
    with pytest.raises(NonFiniteGradient) as refused:
        member.push(float("nan"))
    assert refused.value.details == {"parameter": "users", "row": "7"}
    ((where, ids),) = member.ids.items()
    rows = member.found[where]
    part = {"births": rows.births, "base_version": rows.version, "base_epoch": rows.epoch}
    stranger = next(i for i in range(1000) if where[1] not in route([i], NUM_SHARDS))
    with pytest.raises(MalformedMessage, match=f"row {stranger} at virtual shard {where[1]}"):
        wrong = array("q", [stranger]).tobytes()
        member.client.push({where: Gradients(ids=wrong, gradients=bytes(4 * DIM), **part)})
    with pytest.raises(ShapeMismatch, match="12 bytes of gradients"):
        member.client.push({where: Gradients(ids=ids.tobytes(), gradients=bytes(12), **part)})
    with pytest.raises(MalformedMessage, match="base version 9"):
        part["base_version"] = 9
        data = bytes(4 * DIM)
        member.client.push({where: Gradients(ids=ids.tobytes(), gradients=data, **part)})
    assert member.look_up([7]) == {7: [1.0] * DIM}
    member.close()


@by_every_way
def test_a_fenced_member_neither_reads_nor_writes(
    servers: ParameterServers, transport: str
) -> None:
    member = Member(servers, servers.admit("w0"), table(), transport=transport)
    member.look_up([1])
    servers.expel("w0")
    with pytest.raises(Fenced):
        member.push(1.0)
    with pytest.raises(Fenced):
        member.look_up([1])
    member.close()


REFUSED: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"dim": 0}, InvalidSpec, "dim of table users"),
    ({"dtype": "int8"}, InvalidSpec, "float32 or float64"),
    ({"num_shards": 5000}, InvalidSpec, "1 to 1024"),
    ({"optimizer": RowOptimizer(kind="lamb")}, UnsupportedOptimizer, "sparse_adam"),
    ({"optimizer": RowOptimizer(kind="sgd", lr=-1.0)}, InvalidSpec, "lr of table users"),
    ({"optimizer": RowOptimizer(kind="sgd", weight_decay=1e39)}, InvalidSpec, "weight_decay"),
    (
        {"dtype": "float16", "initialiser": Initialiser(kind="constant", center=7e4)},
        InvalidSpec,
        "center of initialiser",
    ),
    ({"optimizer": RowOptimizer(kind="adam", beta1=1.0)}, InvalidSpec, "below 1"),
    ({"optimizer": RowOptimizer(kind="sgd", nesterov=True)}, InvalidSpec, "momentum"),
    ({"initialiser": Initialiser(kind="xavier")}, InvalidSpec, "initialiser"),
    ({"admission": Admission(kind="count")}, InvalidSpec, "min_pushes"),
    ({"admission": Admission(kind="probability", probability=2.0)}, InvalidSpec, "probability"),
    ({"eviction": Eviction(max_idle_s=float("inf"))}, InvalidSpec, "max_idle_s"),
    ({"name": "a/b"}, InvalidSpec, "name"),
]


def test_invalid_tables_are_refused(servers: ParameterServers) -> None:
    """Tables are checked before a shard is placed; the error has the setting and its valid
    values."""
    token = servers.admit("w0")
    client = ParameterClient([servers.coordinator], lambda: token)
    for changes, error, message in REFUSED:
        with pytest.raises(error, match=message):
            client.place([], [table(**changes)])
    with pytest.raises(InvalidSpec, match="each once"):
        client.place([], [table(), table()])
    with pytest.raises(InvalidSpec, match="nothing to train"):
        client.place([], [])
    client.close()


def test_another_table_than_the_jobs_is_refused_by_name(servers: ParameterServers) -> None:
    member = Member(servers, servers.admit("w0"), table())
    with pytest.raises(ProposalConflict, match="tables differ from those of job job") as refused:
        Member(servers, servers.admit("w1"), table(dim=5))
    assert set(refused.value.details) == {"users"}
    member.close()
