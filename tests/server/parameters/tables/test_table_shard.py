"""Shards of tables, case by case: rows, fates, memory and order."""

import numpy as np
import pytest
from support.clusters.snapshot_world import loaded
from support.models.table_specs import (
    NUMPY,
    OPTIMIZERS,
    live,
    look_up,
    new_push,
    new_shard,
    new_table,
)

from shoal_proto.errors import (
    ForgottenPush,
    InternalError,
    MalformedMessage,
    NonFiniteGradient,
    Overloaded,
    ShapeMismatch,
    WrongEpoch,
)
from shoal_proto.v1.tables_pb2 import Admission, Eviction, Initialiser, RowFate
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.sessions import MAX_OUTCOMES
from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.hashing import shards_of
from shoal_server.parameters.tables.restore import restore
from shoal_server.parameters.tables.rows import FIRST_CAPACITY
from shoal_server.parameters.tables.shard import TableShard, is_table, table_from_image

APPLIED, MADE = RowFate.ROW_FATE_APPLIED, RowFate.ROW_FATE_MADE
NOT_ADMITTED, EVICTED = RowFate.ROW_FATE_NOT_ADMITTED, RowFate.ROW_FATE_EVICTED
FULL = RowFate.ROW_FATE_FULL


def ones(count: int) -> list[list[float]]:
    return [[1.0, 1.0]] * count


def test_a_lookup_changes_nothing() -> None:
    """A row has its initial values before it is made, and takes no memory until then."""
    shard = new_shard(new_table(initialiser=Initialiser(kind="normal", spread=1.0)))
    before = shard.memory_bytes
    births, first = look_up(shard, range(10_000))
    assert not births.any()
    assert (len(shard.body.content), shard.version, shard.memory_bytes) == (0, 1, before)
    outcome = shard.push(new_push([5], [[1.0, 2.0]]), live)
    assert outcome.fates == bytes([MADE])
    births, values = look_up(shard, [4, 5])
    assert births.tolist() == [0, 2]
    np.testing.assert_array_equal(values, first[4:6] - np.float32([[0, 0], [1, 2]]))


def test_gradients_of_repeated_ids_are_added() -> None:
    """Each position of the push gets its row's fate."""
    shard = new_shard(new_table())
    gradients = [[1.0, 0.0], [10.0, 0.0], [100.0, 0.0], [1000.0, 0.0]]
    outcome = shard.push(new_push([7, 3, 7, -2], gradients), live)
    assert outcome.fates == bytes([MADE] * 4)
    assert look_up(shard, [7, 3, -2])[1][:, 0].tolist() == [-101.0, -10.0, -1000.0]
    assert len(shard.body.content) == 3


def test_gradients_of_repeated_ids_are_added_in_order() -> None:
    """Rounding depends on the order: the same push always has the same result."""
    numbers = np.random.default_rng(3).standard_normal((1000, 2)).astype(np.float32)
    total = np.zeros(2, np.float32)
    for number in numbers:
        total += number
    shard = new_shard(new_table())
    shard.push(new_push([9] * 1000, numbers), live)
    assert look_up(shard, [9])[1][0].tolist() == (-total).tolist()


def test_a_row_made_anew_does_not_get_gradients_of_the_evicted_one() -> None:
    """The push is answered with the fate EVICTED, whether the row was made anew or not."""
    table = new_table(max_rows=2, eviction=Eviction(oldest_when_full=True))
    shard = new_shard(table)
    shard.push(new_push([1], ones(1), sequence=1, at_unix_s=1.0), live)
    births, _ = look_up(shard, [1])
    shard.push(new_push([2, 3], ones(2), sequence=2, at_unix_s=2.0), live)
    assert look_up(shard, [1])[0].tolist() == [0]
    late = new_push([1], ones(1), births=births, sequence=3, at_unix_s=3.0)
    assert shard.push(late, live).fates == bytes([EVICTED])
    shard.push(new_push([1], ones(1), sequence=4, at_unix_s=4.0), live)
    late = new_push([1], ones(1), births=births, sequence=5, at_unix_s=5.0)
    assert shard.push(late, live).fates == bytes([EVICTED])
    births, values = look_up(shard, [1])
    assert births.tolist() == [5]
    assert values.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize("failing", range(6))
def test_a_push_without_memory_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The system refuses memory for one of the columns, or for the ids. The repeated push does what
    it does on a shard with memory: ids are counted, rows evicted and time advanced once."""
    table = new_table(
        optimizer=OPTIMIZERS["adam"],
        admission=Admission(kind="count", min_pushes=2),
        eviction=Eviction(max_idle_s=10.0),
    )
    shard, twin = new_shard(table), new_shard(table)
    for sequence, (ids, at_unix_s) in enumerate(
        [(range(10), 1000.0), (range(10), 1000.0), (range(5, 10), 1005.0), (range(5, 10), 1010.0)]
    ):
        for each in (shard, twin):
            few = new_push(ids, ones(len(ids)), sequence=sequence, at_unix_s=at_unix_s)
            each.push(few, live)
    ids = range(5, 3 * FIRST_CAPACITY)
    many = new_push(ids, ones(len(ids)), sequence=5, at_unix_s=1012.0)
    again = new_push(ids, ones(len(ids)), sequence=6, at_unix_s=1013.0)
    grow, number = GrowingTensor.grow, 0

    def fail_once(column: GrowingTensor, num_rows: int) -> None:
        nonlocal number
        number += 1
        if number == failing + 1:
            raise OSError("Cannot allocate memory")
        grow(column, num_rows)

    with monkeypatch.context() as patch:
        patch.setattr(GrowingTensor, "grow", fail_once)
        before = contents(shard)
        with pytest.raises(Overloaded, match="refuses memory for more rows"):
            shard.push(many, live)
        assert contents(shard) == before
        outcome = shard.push(many, live)
    assert outcome == twin.push(many, live)
    assert set(outcome.fates) == {APPLIED, NOT_ADMITTED}
    assert (look_up(shard, range(10))[0] > 0).tolist() == [False] * 5 + [True] * 5
    assert shard.push(again, live) == twin.push(again, live)
    assert len(shard.body.content) == len(ids)
    assert contents(shard) == contents(twin)


def contents(shard: TableShard) -> tuple[int, dict[str, list[float]]]:
    """Return the version and the tensors of a shard's image."""
    return shard.version, {n: t.flatten().tolist() for n, t in loaded(shard).tensors.items()}


def test_idle_rows_are_evicted_by_the_times_of_pushes() -> None:
    """A push with an earlier time evicts no row."""
    shard = new_shard(new_table(eviction=Eviction(max_idle_s=80.0)))
    shard.push(new_push([1, 2], ones(2), sequence=1, at_unix_s=1000.0), live)
    births, _ = look_up(shard, [1])
    shard.push(new_push([1], ones(1), births=births, sequence=2, at_unix_s=1040.0), live)
    shard.push(new_push([3], ones(1), sequence=3, at_unix_s=1070.0), live)
    shard.push(new_push([5], ones(1), sequence=5, at_unix_s=1090.0), live)
    assert (look_up(shard, [1, 2, 3])[0] > 0).tolist() == [True, False, True]
    shard.push(new_push([4], ones(1), sequence=6, at_unix_s=500.0), live)
    assert (look_up(shard, [1, 2, 3, 4])[0] > 0).tolist() == [True, False, True, True]
    assert shard.body.content.counts.evicted == 1


def test_a_push_with_a_far_later_time_evicts_no_row_in_use() -> None:
    """A push advances the shard's time by at most half of the idle time."""
    shard = new_shard(new_table(eviction=Eviction(max_idle_s=80.0)))
    shard.push(new_push([1, 2], ones(2), sequence=1, at_unix_s=1000.0), live)
    shard.push(new_push([3], ones(1), sequence=2, at_unix_s=1e9), live)
    assert (look_up(shard, [1, 2, 3])[0] > 0).all()
    assert shard.body.content.now_s == 1040.0


def test_the_shards_time_continues_from_the_newest_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard's time advances with the monotonic clock. Rows do not become older if the wall
    clock is set, or on a machine with another clock."""
    wall_s, steady_s = 5000.0, 70.0
    monkeypatch.setattr("time.time", lambda: wall_s)
    monkeypatch.setattr("time.monotonic", lambda: steady_s)
    shard = new_shard(new_table(eviction=Eviction(max_idle_s=80.0)))
    assert shard.body.now_s() == 5000.0
    shard.push(new_push([1], ones(1), sequence=1, at_unix_s=shard.body.now_s()), live)
    wall_s, steady_s = 1e9, 73.0
    assert shard.body.now_s() == 5003.0
    copy = restore(loaded(shard))
    assert is_table(copy)
    steady_s = 12.0
    assert copy.body.now_s() == 5000.0
    wall_s, steady_s = 0.0, 14.5
    assert copy.body.now_s() == 5002.5


def test_rows_in_use_outlast_a_time_without_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later pushes do not make up for the time beyond half of the idle time."""
    steady_s = 70.0
    monkeypatch.setattr("time.monotonic", lambda: steady_s)
    shard = new_shard(new_table(eviction=Eviction(max_idle_s=80.0)))

    def push(sequence: int, ids: list[int]) -> None:
        at_unix_s = shard.body.now_s()
        shard.push(new_push(ids, ones(len(ids)), sequence=sequence, at_unix_s=at_unix_s), live)

    push(1, [1, 2])
    steady_s += 7200.0
    for sequence in range(2, 6):
        push(sequence, [2])
        steady_s += 1.0
    assert (look_up(shard, [1, 2])[0] > 0).all()
    steady_s += 38.0
    push(6, [2])
    assert (look_up(shard, [1, 2])[0] > 0).tolist() == [False, True]


def test_a_primary_that_leads_again_continues_from_the_newest_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The offset from the time when it led before counts no more: rows in use under the primary in
    between are kept."""
    steady_s = 70.0
    monkeypatch.setattr("time.monotonic", lambda: steady_s)
    table = new_table(eviction=Eviction(max_idle_s=80.0))
    first, second = new_shard(table), new_shard(table)
    sequence = 0

    def push(primary: TableShard, backup: TableShard, row: int) -> None:
        nonlocal sequence
        sequence += 1
        at_unix_s = primary.body.now_s()
        primary.subscribe(backup.replay)
        primary.push(new_push([row], ones(1), sequence=sequence, at_unix_s=at_unix_s), live)
        primary.subscribe(None)

    push(first, second, 1)
    steady_s += 7200.0
    for row in range(2, 6):
        push(second, first, row)
    for _ in range(4):
        push(first, second, 6)
    assert (look_up(first, range(2, 7))[0] > 0).all()


def test_a_full_shard_without_eviction_makes_no_rows() -> None:
    """Existing rows are trained; others get the fate FULL."""
    table = new_table(max_rows=2, eviction=Eviction(oldest_when_full=False))
    shard = new_shard(table)
    assert shard.push(new_push([5, 1, 3], ones(3)), live).fates == bytes([FULL, MADE, MADE])
    births, _ = look_up(shard, [1, 5])
    outcome = shard.push(new_push([1, 5], ones(2), births=births, sequence=2), live)
    assert outcome.fates == bytes([APPLIED, FULL])


def test_the_memory_of_a_shard_is_bounded() -> None:
    """The oldest rows are evicted."""
    table = new_table(dim=16, max_shard_bytes=100_000, eviction=Eviction(oldest_when_full=True))
    shard = new_shard(table)
    for step in range(1, 30):
        ids = np.arange(step * 500, step * 500 + 500)
        shard.push(new_push(ids, np.ones((500, 16)), sequence=step, at_unix_s=step), live)
    assert 500 < len(shard.body.content) < 1000
    assert shard.memory_bytes < 100_000 + 2 * 8 * 500 * MAX_OUTCOMES


def test_an_id_is_admitted_at_its_nth_push() -> None:
    """Earlier gradients are dropped, with the fate NOT_ADMITTED."""
    shard = new_shard(new_table(admission=Admission(kind="count", min_pushes=3)))
    fates = [
        shard.push(new_push([8], ones(1), sequence=step), live).fates[0] for step in range(1, 4)
    ]
    assert fates == [NOT_ADMITTED, NOT_ADMITTED, MADE]
    assert look_up(shard, [8])[1].tolist() == [[-1.0, -1.0]]


def test_ids_that_are_pushed_only_once_are_rarely_admitted() -> None:
    """The counts of admission are shared between ids and age, so that few ids are admitted because
    of others."""
    shard = new_shard(new_table(dim=1, admission=Admission(kind="count", min_pushes=4)))
    for step in range(1, 9):
        ids = np.arange(step * 30_000, step * 30_000 + 30_000)
        shard.push(new_push(ids, np.ones(30_000), sequence=step), live)
    assert len(shard.body.content) < 480
    assert shard.body.content.counts.not_admitted == 240_000 - len(shard.body.content)


def test_ids_are_admitted_with_the_specified_probability() -> None:
    """Each push draws again: the same share of the remaining ids is admitted."""
    table = new_table(admission=Admission(kind="probability", probability=0.25))
    shard = new_shard(table)
    ids = np.arange(8000)
    for step, expected in ((1, 2000), (2, 3500)):
        births, _ = look_up(shard, ids)
        shard.push(new_push(ids, np.ones((8000, 2)), births=births, sequence=step), live)
        assert abs(len(shard.body.content) - expected) < 200


def test_fates_of_ended_sessions_are_forgotten() -> None:
    """Replicas forget them as well. The pushes themselves stay remembered."""
    shard = new_shard(new_table(admission=Admission(kind="count", min_pushes=2)))
    records: list[UpdateRecord] = []
    copy = table_from_image(loaded(shard, records.append))
    for number in range(8):
        session = f"s{number}"
        push = new_push([2 * number, 2 * number + 1], ones(2), session=session)
        shard.push(push, lambda name, session=session: name in ("s0", session))
    for record in records:
        copy.replay(record)
    for each in (shard, copy):
        assert each.body.answers.num_bytes == 4
        assert each.body.fates("s0", 1) == bytes([NOT_ADMITTED] * 2)
        assert all(each.sessions.has_applied(f"s{number}", 1) for number in range(8))


def test_a_repeated_push_gets_the_first_fates() -> None:
    """A copy made from an image repeats the first fates as well."""
    shard = new_shard(new_table(admission=Admission(kind="count", min_pushes=2)))
    first = shard.push(new_push([1, 2], ones(2)), live)
    shard.push(new_push([1, 2], ones(2), sequence=2), live)
    copy = restore(loaded(shard))
    assert is_table(copy)
    for holder in (shard, copy):
        again = holder.push(new_push([1, 2], ones(2)), live)
        assert again.is_duplicate
        assert (again.version, again.fates) == (first.version, bytes([NOT_ADMITTED] * 2))
        assert holder.version == 3


def test_a_push_older_than_the_remembered_ones_is_refused() -> None:
    """The shard does not know if it was applied."""
    shard = new_shard(new_table())
    for step in range(1, MAX_OUTCOMES + 2):
        births, _ = look_up(shard, [1])
        shard.push(new_push([1], ones(1), births=births, sequence=step), live)
    with pytest.raises(ForgottenPush):
        shard.push(new_push([1], ones(1), sequence=1), live)


def test_staleness_is_returned_and_counted() -> None:
    """The staleness is the number of the shard's updates since the lookup; 0 for a version lost
    with its epoch."""
    shard = new_shard(new_table())
    for step in range(1, 4):
        shard.push(new_push([step], ones(1), sequence=step), live)
    assert shard.push(new_push([9], ones(1), sequence=4, base_version=2), live).staleness == 2
    lost = new_push([9], ones(1), sequence=5, base_version=40, base_epoch=1, epoch=2)
    shard.enter_epoch(2)
    assert shard.push(lost, live).staleness == 0
    described = shard.describe("job")
    assert (described.pushes, described.version, described.epoch) == (5, 6, 2)
    assert list(described.staleness_counts[:4]) == [2, 1, 2, 0]


def test_an_invalid_push_changes_nothing() -> None:
    """An invalid push has a wrong epoch, length, shard or base, an infinity, or two births of a
    row."""
    table = new_table(num_shards=2)
    shard = new_shard(table)
    here, elsewhere = (int(np.flatnonzero(shards_of(np.arange(50), 2) == i)[0]) for i in (0, 1))
    good = [1.0, 1.0]
    with pytest.raises(WrongEpoch):
        shard.push(new_push([here], [good], epoch=2), live)
    with pytest.raises(ShapeMismatch, match="8 bytes for 1 rows"):
        shard.push(new_push([here], [[1.0] * 3]), live)
    with pytest.raises(ShapeMismatch, match="0 bytes of births"):
        shard.push(new_push([here], [good], births=[]), live)
    with pytest.raises(MalformedMessage, match=f"row {elsewhere}"):
        shard.push(new_push([elsewhere], [good]), live)
    with pytest.raises(MalformedMessage, match="cut off"):
        shard.push(new_push([here], [good], row_ids=b"1234"), live)
    with pytest.raises(MalformedMessage, match="base version 7"):
        shard.push(new_push([here], [good], base_version=7), live)
    with pytest.raises(MalformedMessage, match="different births"):
        shard.push(new_push([here, here], [good, good], births=[0, 5]), live)
    with pytest.raises(NonFiniteGradient) as refused:
        shard.push(new_push([here], [[1.0, float("inf")]]), live)
    assert refused.value.details == {"parameter": "users", "row": str(here)}
    huge = np.float32(3e38)
    assert shard.version == 1
    assert len(shard.body.content) == 0
    assert shard.push(new_push([here], [[huge, huge]]), live).version == 2


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_values_have_the_dtype_of_the_table(dtype: str) -> None:
    """Values that the dtype can represent are exact."""
    shard = new_shard(new_table(dtype=dtype))
    shard.push(new_push([1], [[0.5, -0.25]], dtype=NUMPY[dtype]), live)
    assert look_up(shard, [1, 2])[1].tolist() == [[-0.5, 0.25], [0.0, 0.0]]


def test_a_copy_refuses_records_out_of_order_and_incomplete_images() -> None:
    """An image of another kind is refused as well."""
    shard = new_shard(new_table())
    records: list[UpdateRecord] = []
    image = loaded(shard, records.append)
    for step in (1, 2):
        shard.push(new_push([step], ones(1), sequence=step), live)
    copy = table_from_image(image)
    with pytest.raises(InternalError, match="out of order"):
        copy.replay(records[1])
    copy.replay(records[0])
    assert copy.version == 2
    torn = dict(image.tensors)
    del torn["births"]
    for tensors, kind in ((torn, "table"), (image.tensors, "dense")):
        with pytest.raises(InternalError):
            table_from_image(
                LoadedImage(
                    kind=kind,
                    shard_id=image.shard_id,
                    version=image.version,
                    spec=image.spec,
                    tensors=tensors,
                    sessions=image.sessions,
                )
            )
