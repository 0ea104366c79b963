"""A comparison of a shard's pieces finds copies that differ from their primary, and no others."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.clusters.snapshot_world import loaded
from support.models import table_specs
from support.models.dense_shards import SPECS, is_live, new_shard, push_to
from support.models.table_specs import new_push, new_table

from shoal_proto.v1.tables_pb2 import Admission, Eviction
from shoal_server.parameters.comparison.digest import Comparison, PieceWalk, compared
from shoal_server.parameters.shard.dense import dense_from_image
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.sessions import RememberedOutcome
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.tables.restore import restore
from shoal_server.parameters.tables.shard import TableShard

PIECE_BYTES = 256
SAME, DIFFERENT = Comparison.SAME, Comparison.DIFFERENT


def walked(primary: AnyShard, copy: AnyShard, piece_bytes: int = PIECE_BYTES) -> set[Comparison]:
    """Compare all pieces once, and return the kinds of outcomes."""
    walk, found = PieceWalk(piece_bytes), set()
    while walk.num_rounds == 0:
        found.add(compared(copy, walk.next(primary)))
    return found


@pytest.mark.sampled()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SPECS)
def test_a_copy_that_replays_is_the_same_at_each_version(case: str, dtype: str) -> None:
    """Digests are equal for every optimizer and every piece, with a push between any two pieces."""
    shard = new_shard(case, dtype)
    shard.push(push_to(shard, 1, dtype), is_live)
    records: list[UpdateRecord] = []
    copy = dense_from_image(loaded(shard, records.append))
    walk, num_pushed = PieceWalk(PIECE_BYTES), 1
    while walk.num_rounds == 0:
        digest = walk.next(shard)
        assert compared(copy, digest) is SAME, digest.piece
        num_pushed += 1
        shard.push(push_to(shard, num_pushed, dtype), is_live)
        assert compared(shard, digest) is Comparison.ANOTHER_VERSION
        copy.replay(records.pop())


def tensors_of(case: str) -> list[str]:
    return list(new_shard(case, "float32").body.flat_tensors())


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in ("adam", "amsgrad") for name in tensors_of(case)]
)
def test_a_different_bit_is_found_in_any_tensor(case: str, name: str) -> None:
    """The bit is at the beginning or the end of the values or of the optimizer's state."""
    shard = new_shard(case, "float32")
    shard.push(push_to(shard, 1, "float32"), is_live)
    for at in (0, -1):
        copy = dense_from_image(loaded(shard))
        assert walked(shard, copy) == {SAME}
        copy.body.flat_tensors()[name].reshape(-1).view(torch.uint8)[at] ^= 1
        assert walked(shard, copy) == {SAME, DIFFERENT}


def forget_a_session(shard: AnyShard) -> None:
    shard.sessions.forget(["s1"])


def remember_another_session(shard: AnyShard) -> None:
    shard.sessions.remember("z", 1, RememberedOutcome(2, 0))


def remember_another_outcome(shard: AnyShard) -> None:
    shard.sessions.remember("s1", 1, RememberedOutcome(9, 0))


@pytest.mark.parametrize(
    "spoil", [forget_a_session, remember_another_session, remember_another_outcome]
)
def test_different_sessions_are_found(spoil: Callable[[AnyShard], None]) -> None:
    """A copy with other sessions would apply a push twice, or answer it differently."""
    shard = new_shard("sgd", "float32")
    for number in range(3):
        shard.push(push_to(shard, number + 1, "float32", session=f"s{number}"), is_live)
    copy = dense_from_image(loaded(shard))
    assert walked(shard, copy) == {SAME}
    spoil(copy)
    assert walked(shard, copy) == {SAME, DIFFERENT}


def rows_pushed(optimizer: str, **changes: object) -> tuple[TableShard, TableShard]:
    """Return a table's shard, and a copy begun after half of its pushes. Rows are made, evicted and
    made again, so that their positions in the copy differ."""
    spec = new_table(
        optimizer=table_specs.OPTIMIZERS[optimizer],
        eviction=Eviction(oldest_when_full=True),
        max_rows=64,
        **changes,
    )
    shard = table_specs.new_shard(spec)
    records: list[UpdateRecord] = []
    copy = shard
    random = np.random.default_rng(5)
    for number in range(1, 41):
        ids = random.choice(200, size=8, replace=False)
        gradient = random.standard_normal((8, 2))
        push = new_push(ids, gradient, sequence=number, at_unix_s=1e9 + number)
        shard.push(push, table_specs.live)
        if number == 20:
            copy = restore(loaded(shard, records.append))  # type: ignore[assignment]
    for record in records:
        copy.replay(record)
    return shard, copy


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer", table_specs.OPTIMIZERS)
def test_a_copy_of_a_table_is_the_same_at_other_positions_of_rows(optimizer: str) -> None:
    shard, copy = rows_pushed(optimizer, admission=Admission(kind="count", min_pushes=2))
    assert live_ids(shard).tolist() != live_ids(copy).tolist()
    assert walked(shard, copy, 4096) == {SAME}
    assert walked(copy, shard, 100) == {SAME}


def without_a_row(shard: TableShard) -> None:
    rows = shard.body.content.rows
    rows.remove(rows.find(live_ids(shard)[:1]))


def with_another_row(shard: TableShard) -> None:
    rows = shard.body.content.rows
    rows.add(np.array([7777]), torch.zeros(1, 2), birth=3)


def with_another_birth(shard: TableShard) -> None:
    rows = shard.body.content.rows
    rows.columns["births"][rows.find(live_ids(shard)[-1:])] += 1


def with_another_state(shard: TableShard) -> None:
    rows = shard.body.content.rows
    at = int(rows.find(live_ids(shard)[-1:])[0])
    rows.columns["optimizer/" + rows.state_names[0]][at].view(-1)[0] += 1


def with_another_count(shard: TableShard) -> None:
    shard.body.flat_tensors()["admission_counts"][3, 17] += 1


def with_another_fate(shard: TableShard) -> None:
    shard.body.answers.remember("a", 40, b"\2" * 8)


def live_ids(shard: TableShard) -> np.ndarray:
    return np.frombuffer(shard.body.row_ids(0, 1 << 20)[0], np.int64)


SPOILT = [
    without_a_row,
    with_another_row,
    with_another_birth,
    with_another_state,
    with_another_count,
    with_another_fate,
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_copy_of_a_table_that_differs_is_found(spoil: Callable[[TableShard], None]) -> None:
    """The copy differs by a row, a birth, a row's state, a count of admission or a remembered
    fate."""
    shard, copy = rows_pushed("adagrad", admission=Admission(kind="count", min_pushes=2))
    spoil(copy)
    assert DIFFERENT in walked(shard, copy, 4096)


def test_each_byte_is_in_one_piece_of_a_round() -> None:
    """No piece is larger than its bound."""
    shard = new_shard("adam", "float64")
    walk, seen = PieceWalk(PIECE_BYTES), dict.fromkeys(shard.body.flat_tensors(), 0)
    for digest in round_of(walk, shard):
        piece = digest.piece
        if piece.part in seen:
            assert piece.stop - piece.start <= PIECE_BYTES
            assert piece.start == seen[piece.part]
            seen[piece.part] = piece.stop
    assert seen == {name: t.nbytes for name, t in shard.body.flat_tensors().items()}


def round_of(walk: PieceWalk, shard: AnyShard) -> Iterator[object]:
    while walk.num_rounds == 0:
        yield walk.next(shard)
