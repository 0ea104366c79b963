"""Rows inside one worker: sorting ids, caching rows, adding up gradients."""

import gc
import weakref
from array import array
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.embedding.cache import CachedRows, HotRows
from shoal.embedding.routing import route
from shoal.embedding.rows import TableRows
from shoal_client.parameters.table_rows import Gradients, Rows, TablePushResult, Where
from shoal_client.parameters.table_rows import route as route_one_by_one
from shoal_proto.errors import InvalidSpec, NonFiniteGradient
from shoal_proto.v1.tables_pb2 import RowFate, TableSpec

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
CPU = torch.device("cpu")


@pytest.mark.long
@settings(deadline=None)
@given(IDS, st.integers(1, 100))
def test_arrays_are_routed_as_single_ids(ids: list[int], num_shards: int) -> None:
    """Ids are sent once each, to the shard where a client without arrays looks for them."""
    routed, places = route(np.array(ids, np.int64), num_shards)
    assert routed.ids[places].tolist() == ids
    by_shard = {s: routed.ids[start:stop].tolist() for s, start, stop in routed.spans()}
    assert by_shard == {s: i.tolist() for s, i in route_one_by_one(ids, num_shards).items()}


def held(ids: list[int], version: int) -> CachedRows:
    """Rows whose values are their id and version."""
    count = len(ids)
    return CachedRows(
        values=torch.tensor([[float(i), float(version)] for i in ids]).view(-1, 2),
        births=np.full(count, version),
        versions=np.full(count, version),
        epochs=np.ones(count, np.int64),
    )


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.integers(0, 60), min_size=1, max_size=30), min_size=1, max_size=8))
def test_the_cache_returns_only_the_newest_row_of_an_id(puts: list[set[int]]) -> None:
    """Many ids share few slots: the cache never returns another id's row, nor an older one."""
    cache = HotRows(16, 2, torch.float32)
    newest: dict[int, int] = {}
    for version, ids in enumerate(puts, 1):
        cache.store_rows(np.array(sorted(ids)), held(sorted(ids), version), step=version)
        newest |= dict.fromkeys(ids, version)
        asked = np.arange(61)
        places = cache.find(asked, 0, np.zeros(61, np.int64), np.ones(61, np.int64))
        found = np.flatnonzero(places >= 0)
        assert 0 < len(found) <= 16
        rows = cache.take(places[found])
        for row_id, value, birth in zip(found, rows.values.tolist(), rows.births, strict=True):
            assert value == [row_id, newest[row_id]]
            assert birth == newest[row_id]


def test_cached_rows_that_are_too_old_are_not_found() -> None:
    """Age is judged by the step of the lookup, and by the shard's version and epoch at that
    time."""
    cache = HotRows(16, 2, torch.float32)
    ids = np.array([3])
    cache.store_rows(ids, held([3], 7), step=5)
    assert cache.find(ids, 5, np.array([7]), np.array([1]))[0] >= 0
    assert cache.find(ids, 6, np.array([7]), np.array([1]))[0] == -1
    assert cache.find(ids, 5, np.array([8]), np.array([1]))[0] == -1
    assert cache.find(ids, 5, np.array([7]), np.array([2]))[0] == -1


def new_rows(bound: int = 0) -> TableRows:
    spec = TableSpec(name="t", dim=1, dtype="float32", num_shards=1)
    return TableRows(spec, cache_rows=64, staleness_bound=bound)


def test_a_dtype_without_rows_is_refused_by_name() -> None:
    spec = TableSpec(name="t", dim=1, dtype="int64", num_shards=1)
    with pytest.raises(InvalidSpec, match=r"table t has a dtype.*saw 'int64'; expected float32"):
        TableRows(spec, cache_rows=64, staleness_bound=0)


def use(
    rows: TableRows,
    births: dict[int, int],
    version: int,
    *,
    epoch: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Run a forward pass over the ids of `births`. Rows that are not cached are looked up, with
    these births, this version and this epoch; `meanwhile` is called during the lookup."""
    routed, _ = route(np.array(sorted(births), np.int64), 1)
    lookup = rows.begin(routed)
    meanwhile()
    found: dict[Where, Rows] = {}
    if lookup.ids_by_shard():
        missing = lookup.missing.ids.tolist()
        found["t", 0] = Rows(
            version=version,
            epoch=epoch,
            births=array("Q", [births[i] for i in missing]).tobytes(),
            values=array("f", [0.0] * len(missing)).tobytes(),
            step=version,
        )
    return rows.make_leaf(routed, rows.finish(lookup, found), CPU)


def is_missing(rows: TableRows, row_id: int) -> bool:
    routed, _ = route(np.array([row_id], np.int64), 1)
    return bool(rows.begin(routed).is_missing.all())


def test_after_a_rollback_rows_of_undone_training_are_looked_up_again() -> None:
    """The shard went from version 500 back to 300. The cache keeps the rows looked up since."""
    rows = new_rows(bound=4)
    rows.begin_step()
    use(rows, {1: 0}, version=500)
    rows.begin_step()
    assert not is_missing(rows, 1)
    use(rows, {2: 0}, version=300, epoch=2)
    rows.begin_step()
    assert is_missing(rows, 1) and not is_missing(rows, 2)


def test_a_push_after_a_rollback_shows_that_cached_rows_are_of_undone_training() -> None:
    rows = new_rows(bound=4)
    rows.begin_step()
    use(rows, {1: 0}, version=500).sum().backward()  # type: ignore[no-untyped-call]
    where = ("t", 0)
    result = TablePushResult(
        sequence=1,
        versions={where: 301},
        epochs={where: 2},
        fates={where: b""},
        steps={where: 1},
    )
    rows.pushed(rows.gradients(1.0), result)
    assert is_missing(rows, 1)


def test_forgotten_rows_are_looked_up_again() -> None:
    """No later step shows that other members have changed a row since the last lookup."""
    rows = new_rows(bound=4)
    rows.begin_step()
    use(rows, {1: 0}, version=10)
    rows.forget()
    assert is_missing(rows, 1)


def test_rows_that_arrive_after_the_end_of_training_are_looked_up_again() -> None:
    """A prefetch that began before may lack the last pushes."""
    rows = new_rows(bound=4)
    rows.begin_step()
    use(rows, {1: 0}, version=10, meanwhile=rows.forget)
    assert is_missing(rows, 1)
    use(rows, {1: 0}, version=10)
    assert not is_missing(rows, 1)


def test_the_age_of_a_row_counts_from_the_begin_of_its_lookup() -> None:
    """Steps begin while a prefetch is in progress."""
    rows = new_rows(bound=1)
    rows.begin_step()
    use(rows, {1: 0}, version=10, meanwhile=rows.begin_step)
    assert not is_missing(rows, 1)
    rows.begin_step()
    assert is_missing(rows, 1)


def test_rows_of_an_evaluation_after_training_are_not_kept() -> None:
    """Each evaluated batch would stay in memory if gradients are enabled."""
    rows = new_rows()
    rows.forget()
    values = weakref.ref(use(rows, {1: 0}, version=10))
    gc.collect()
    assert values() is None
    rows.begin_step()
    use(rows, {1: 0}, version=10).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.gradients(1.0)


def by_id(part: Gradients) -> dict[int, tuple[int, float]]:
    """Return birth and gradient of each id."""
    columns = (array("q", part.ids), array("Q", part.births), array("f", part.gradients))
    return {i: (b, g) for i, b, g in zip(*columns, strict=True)}


def test_gradients_of_several_passes_are_added_up() -> None:
    """Rows count once each, on the oldest version of all passes; a pass without a backward adds
    nothing."""
    rows = new_rows()
    rows.begin_step()
    first = use(rows, {1: 0, 2: 4}, version=5)
    second = use(rows, {2: 4, 3: 5}, version=6)
    use(rows, {9: 0}, version=6)
    (first.sum() + 10 * second.sum()).backward()
    part = rows.gradients(0.5)["t", 0]
    assert by_id(part) == {1: (0, 1.0), 2: (4, 11.0), 3: (5, 10.0)}
    assert (part.base_version, part.base_epoch, part.step, part.lr) == (5, 1, 7, 0.5)
    rows.begin_step()
    assert rows.gradients(0.5) == {}


def test_a_gradient_for_an_earlier_birth_of_a_row_is_left_out() -> None:
    """Row 1 was removed and made again between two passes of one step. The gradient on a row's
    initial values counts, though the row was made between the passes."""
    rows = new_rows()
    rows.begin_step()
    first = use(rows, {1: 3, 2: 0}, version=5)
    other = use(rows, {7: 0}, version=9)
    second = use(rows, {1: 8, 2: 9}, version=9)
    (first.sum() + other.sum() + 10 * second.sum()).backward()
    assert by_id(rows.gradients(1.0)["t", 0]) == {1: (8, 10.0), 2: (9, 11.0), 7: (0, 1.0)}


def test_fates_of_rows_are_counted() -> None:
    """Rows are counted by fate; without fates in the answer, all rows were applied."""
    rows = new_rows()
    for fates in (b"", bytes([RowFate.ROW_FATE_MADE, RowFate.ROW_FATE_EVICTED])):
        rows.begin_step()
        use(rows, {1: 0, 2: 0}, version=1).sum().backward()  # type: ignore[no-untyped-call]
        parts = rows.gradients(1.0)
        result = TablePushResult(
            sequence=1,
            versions={("t", 0): 2},
            epochs={("t", 0): 1},
            fates={("t", 0): fates},
            steps={("t", 0): 1},
        )
        rows.pushed(parts, result)
    assert rows.fates == {"applied": 2, "made": 1, "not_admitted": 0, "evicted": 1, "full": 0}


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    """The error has the table's name and the row's id."""
    rows = new_rows()
    rows.begin_step()
    value = use(rows, {4: 0, 6: 0}, version=1)
    (value * torch.tensor([[1.0], [float("nan")]])).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(NonFiniteGradient) as refused:
        rows.gradients(1.0)
    assert refused.value.details == {"parameter": "t", "row": "6"}
