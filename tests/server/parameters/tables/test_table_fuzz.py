"""Tables under random pushes, evictions and repetitions, compared with a slow twin.

Gradients are whole numbers and rows begin with zeros: sums are exact, so that a gradient applied to
a wrong row is found.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters.snapshot_world import loaded
from support.models.table_specs import OPTIMIZERS, live, look_up, new_push, new_shard, new_table

from shoal_proto.v1.tables_pb2 import Admission, Eviction, Initialiser, RowFate, TableSpec
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.versioned import ShardPushResult
from shoal_server.parameters.tables.shard import TablePush, TableShard, table_from_image

NUM_IDS = 6
NUM_PUSHERS = 2
START_S = 1e9
Fate = RowFate.ValueType


@dataclass
class Row:
    birth: int
    value: float
    last_pushed_s: float


@dataclass
class Twin:
    """The rules of docs/tables.md, applied to each id in turn."""

    table: TableSpec
    max_rows: int
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    version: int = 1
    next_sweep_s: float = 0.0
    now_s: float = 0.0

    def push(self, at_s: float, gradients: dict[int, tuple[int, float]]) -> dict[int, Fate]:
        """Apply a push; `gradients` maps an id to (birth as looked up, gradient)."""
        self.version += 1
        if self.now_s and self.table.eviction.max_idle_s:
            at_s = min(at_s, self.now_s + self.table.eviction.max_idle_s / 2)
        self.now_s = at_s = max(self.now_s, at_s)
        self.sweep(at_s)
        fates: dict[int, Fate] = {}
        admitted = []
        for row_id, (birth, _) in sorted(gradients.items()):
            row = self.rows.get(row_id)
            if birth and (row is None or row.birth != birth):
                fates[row_id] = RowFate.ROW_FATE_EVICTED
            elif row is not None:
                fates[row_id] = RowFate.ROW_FATE_APPLIED
                row.last_pushed_s = at_s
            elif self.admits(row_id):
                admitted.append(row_id)
            else:
                fates[row_id] = RowFate.ROW_FATE_NOT_ADMITTED
        self.make_room(
            len(admitted), {i for i, f in fates.items() if f == RowFate.ROW_FATE_APPLIED}
        )
        for row_id in admitted:
            if len(self.rows) < self.max_rows:
                self.rows[row_id] = Row(self.version, 0.0, at_s)
                fates[row_id] = RowFate.ROW_FATE_MADE
            else:
                fates[row_id] = RowFate.ROW_FATE_FULL
        for row_id, (_, gradient) in gradients.items():
            if fates[row_id] in (RowFate.ROW_FATE_APPLIED, RowFate.ROW_FATE_MADE):
                self.rows[row_id].value -= gradient
        return fates

    def sweep(self, now_s: float) -> None:
        idle_s = self.table.eviction.max_idle_s
        if idle_s and now_s >= self.next_sweep_s:
            self.next_sweep_s = now_s + idle_s / 8
            self.rows = {i: r for i, r in self.rows.items() if r.last_pushed_s >= now_s - idle_s}

    def admits(self, row_id: int) -> bool:
        self.counts[row_id] = self.counts.get(row_id, 0) + 1
        return self.counts[row_id] >= self.table.admission.min_pushes

    def make_room(self, num_wanted: int, spared: set[int]) -> None:
        missing = len(self.rows) + num_wanted - self.max_rows
        if missing <= 0 or not self.table.eviction.oldest_when_full:
            return
        oldest = sorted(self.rows.keys() - spared, key=lambda i: (self.rows[i].last_pushed_s, i))
        for row_id in oldest[: max(missing, self.max_rows // 16)]:
            del self.rows[row_id]


TABLES = st.builds(
    lambda min_pushes, idle_s, oldest, max_rows: new_table(
        dim=1,
        admission=Admission(kind="count", min_pushes=min_pushes),
        eviction=Eviction(max_idle_s=idle_s, oldest_when_full=oldest),
        max_rows=max_rows,
    ),
    st.integers(1, 2),
    st.sampled_from([0.0, 8.0, 40.0]),
    st.booleans(),
    st.integers(1, 6),
)
Step = tuple[str, int, list[int], int]
"""Action, worker, ids, and seconds since the previous step."""
SCRIPTS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(["look up", "push", "train", "train", "retry"]),
        st.integers(0, NUM_PUSHERS - 1),
        st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=5),
        st.integers(0, 12),
    ),
    min_size=15,
    max_size=50,
)


@dataclass
class Pusher:
    """Worker that keeps the births of rows that it looked up, however old, and pushes with them."""

    name: str
    births: dict[int, int] = field(default_factory=dict)
    sequence: int = 0
    last: tuple[TablePush, ShardPushResult] | None = None


class World:
    """A shard, its twin, the workers, and a copy of the shard that replays its records."""

    def __init__(self, table: TableSpec) -> None:
        self.now_s = START_S
        self.shard = new_shard(table)
        self.twin = Twin(table, table.max_rows)
        self.pushers = [Pusher(f"w{i}") for i in range(NUM_PUSHERS)]
        self.records: list[UpdateRecord] = []
        self.copy = table_from_image(loaded(self.shard, self.records.append))

    def copy_again(self) -> None:
        """Begin the copy again, from another image."""
        self.records.clear()
        self.copy = table_from_image(loaded(self.shard))

    def look_up(self, pusher: Pusher, ids: list[int]) -> None:
        births, values = look_up(self.shard, ids)
        for row_id, birth, value in zip(ids, births.tolist(), values[:, 0], strict=True):
            pusher.births[row_id] = birth
            row = self.twin.rows.get(row_id, Row(0, 0.0, 0.0))
            assert (birth, value) == (row.birth, row.value)

    def push(self, pusher: Pusher, ids: list[int]) -> None:
        births = [pusher.births.get(i, 0) for i in ids]
        gradients = [1000.0 * self.twin.version + i for i in ids]
        pusher.sequence += 1
        push = new_push(
            ids,
            gradients,
            births=births,
            session=pusher.name,
            sequence=pusher.sequence,
            at_unix_s=self.now_s,
        )
        outcome = self.shard.push(push, live)
        pusher.last = (push, outcome)
        total: dict[int, tuple[int, float]] = {}
        for row_id, birth, gradient in zip(ids, births, gradients, strict=True):
            total[row_id] = (birth, total.get(row_id, (0, 0.0))[1] + gradient)
        expected = self.twin.push(self.now_s, total)
        assert list(outcome.fates or bytes(len(ids))) == [expected[i] for i in ids]
        assert outcome.version == self.twin.version
        assert len(self.shard.body.content) == len(self.twin.rows) <= self.twin.max_rows

    def retry(self, pusher: Pusher) -> None:
        if pusher.last is None:
            return
        push, first = pusher.last
        again = self.shard.push(push, live)
        assert again.is_duplicate
        assert (again.version, again.staleness, again.fates) == (
            first.version,
            first.staleness,
            first.fates,
        )


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(TABLES, SCRIPTS)
def test_a_table_equals_its_slow_twin(table: TableSpec, script: list[Step]) -> None:
    """Values, births and fates are equal after any pushes of two workers, with old lookups,
    repetitions, evictions and admissions. A copy begun halfway equals the shard once it has
    replayed the rest."""
    world = World(table)
    for number, (what, who, ids, pause_s) in enumerate(script):
        world.now_s += pause_s
        pusher = world.pushers[who]
        if number == len(script) // 2:
            world.copy_again()
        if what in ("look up", "train"):
            world.look_up(pusher, ids)
        if what in ("push", "train"):
            world.push(pusher, ids)
        if what == "retry":
            world.retry(pusher)
    births, values = look_up(world.shard, range(NUM_IDS))
    rows = [world.twin.rows.get(i, Row(0, 0.0, 0.0)) for i in range(NUM_IDS)]
    assert births.tolist() == [row.birth for row in rows]
    assert values[:, 0].tolist() == [row.value for row in rows]
    for record in world.records:
        world.copy.replay(record)
    assert_same(world.copy, world.shard)


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from(sorted(OPTIMIZERS)), seed=st.integers(0, 2**32 - 1))
def test_a_replayed_copy_is_the_same_bit_for_bit(kind: str, seed: int) -> None:
    """Copies are begun at different times, with every optimizer; rows are evicted and admitted."""
    table = new_table(
        dim=5,
        initialiser=Initialiser(kind="normal", spread=0.1),
        optimizer=OPTIMIZERS[kind],
        admission=Admission(kind="probability", probability=0.7),
        eviction=Eviction(max_idle_s=30.0, oldest_when_full=True),
        max_rows=60,
    )
    random = np.random.default_rng(seed)
    shard = new_shard(table)
    records: list[UpdateRecord] = []
    copies = [table_from_image(loaded(shard, records.append))]
    starts = [0]
    for number in range(1, 30):
        ids = random.integers(0, 200, random.integers(1, 40))
        births, _ = look_up(shard, ids)
        gradient = random.standard_normal((len(ids), 5), np.float32)
        push = new_push(
            ids, gradient, births=births, sequence=number, step=number, at_unix_s=START_S + number
        )
        shard.push(push, live)
        if number % 10 == 0:
            copies.append(table_from_image(loaded(shard)))
            starts.append(number)
    for start, copy in zip(starts, copies, strict=True):
        for record in records[start:]:
            copy.replay(record)
        assert_same(copy, shard)


def assert_same(seen: TableShard, expected: TableShard) -> None:
    """Check that both are equal bit for bit, including sessions."""
    one, other = loaded(seen), loaded(expected)
    assert one.version == other.version
    assert one.spec == other.spec
    assert list(one.sessions) == list(other.sessions)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype, name
        assert tensor.numpy().tobytes() == other.tensors[name].numpy().tobytes(), name
