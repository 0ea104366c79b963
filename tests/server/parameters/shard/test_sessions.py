"""Sessions: no push is applied twice, and the number of remembered outcomes is bounded."""

import random

import pytest

from shoal_proto.errors import ForgottenPush, InternalError, Overloaded
from shoal_proto.v1.replication_pb2 import SessionImage
from shoal_server.parameters.shard.sessions import RememberedOutcome, SessionTable
from shoal_server.parameters.shard.step_scope import Scope


def test_a_repeated_push_gets_the_first_outcome() -> None:
    """Later pushes do not change the answer."""
    table = SessionTable()
    table.remember("a", 1, RememberedOutcome(2, 0))
    table.remember("a", 2, RememberedOutcome(5, 1))
    table.remember("b", 1, RememberedOutcome(6, 3))
    assert table.recall("a", 1) == RememberedOutcome(2, 0)
    assert table.recall("a", 2) == RememberedOutcome(5, 1)
    assert table.recall("b", 1) == RememberedOutcome(6, 3)
    assert table.recall("a", 3) is None
    assert table.recall("c", 1) is None


def test_a_push_older_than_the_remembered_ones_is_refused() -> None:
    """The outcome of an old push was forgotten, so that the push may have been applied."""
    table = SessionTable(max_outcomes=3)
    for sequence in range(1, 6):
        table.remember("a", sequence, RememberedOutcome(sequence + 1, 0))
    for forgotten in (1, 2):
        with pytest.raises(ForgottenPush, match="above 2"):
            table.recall("a", forgotten)
    assert table.recall("a", 3) == RememberedOutcome(4, 0)


def test_only_ended_sessions_are_evicted() -> None:
    """A new session is refused as Overloaded if all sessions are live."""
    table = SessionTable(max_sessions=2)
    table.remember("dead", 1, RememberedOutcome(2, 0))
    table.remember("live", 1, RememberedOutcome(3, 0))
    assert table.evict_for("new", lambda session: session == "live") == ["dead"]
    table.remember("new", 1, RememberedOutcome(4, 0))
    assert len(table) == 2
    assert table.recall("live", 1) == RememberedOutcome(3, 0)
    with pytest.raises(Overloaded, match="2 live sessions"):
        table.evict_for("newer", lambda session: True)
    table.evict_for("live", lambda session: True)


def test_the_number_of_sessions_is_an_option() -> None:
    """The refusal names it."""
    table = SessionTable(max_sessions=1)
    table.remember("a", 1, RememberedOutcome(2, 0))
    with pytest.raises(Overloaded, match="--max-sessions"):
        table.evict_for("b", lambda session: True)
    table.max_sessions = 2
    assert table.evict_for("b", lambda session: True) == ()


def test_remembered_outcomes_count_as_memory() -> None:
    """The size includes the bits of scopes, and is the same after a restore."""
    table = SessionTable(max_sessions=4)
    assert table.num_bytes == 0
    scope = Scope.of(range(5000))
    for sequence in range(1, 20):
        for session in "abc":
            table.remember(session, sequence, RememberedOutcome(sequence + 1, 0), scope)
    assert 24 * 625 < table.num_bytes < 24 * 1000
    restored = SessionTable()
    restored.restore(table.export())
    assert restored.num_bytes == table.num_bytes
    table.forget(["a", "b", "c", "never"])
    assert table.num_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_no_sequence_is_accepted_twice_in_any_order(seed: int) -> None:
    """Pushes arrive in random order, with repetitions and gaps; the table remembers four
    outcomes."""
    rng = random.Random(seed)
    table = SessionTable(max_outcomes=4)
    applied: dict[int, RememberedOutcome] = {}
    for number in range(500):
        sequence = max(1, number // 3 + rng.randrange(-8, 4))
        try:
            known = table.recall("s", sequence)
        except ForgottenPush:
            continue
        assert known == applied.get(sequence)
        if known is None:
            applied[sequence] = RememberedOutcome(len(applied) + 2, 0)
            table.remember("s", sequence, applied[sequence])
    assert len(applied) > 50


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_table_equals_the_exported_one(seed: int) -> None:
    """The restored table gives the same answers, also for forgotten sequences."""
    rng = random.Random(seed)
    table = SessionTable(max_outcomes=4)
    for version in range(2, 60):
        table.remember(
            rng.choice("abc"), version + rng.randrange(-3, 3), RememberedOutcome(version, 1)
        )
    restored = SessionTable(max_outcomes=4)
    restored.remember("gone", 1, RememberedOutcome(2, 0))
    restored.restore(table.export())
    assert restored.export() == table.export()
    assert len(restored) == 3
    for session in "abc":
        for sequence in range(65):
            assert answer(restored, session, sequence) == answer(table, session, sequence)


def answer(table: SessionTable, session: str, sequence: int) -> RememberedOutcome | str | None:
    try:
        return table.recall(session, sequence)
    except ForgottenPush as error:
        return str(error)


def test_an_incomplete_export_is_refused() -> None:
    """A table restored with only some outcomes would accept a push twice."""
    table = SessionTable()
    table.remember("a", 1, RememberedOutcome(2, 0))
    with pytest.raises(InternalError, match="session a are inconsistent"):
        table.restore([SessionImage(session="a", sequences=[1, 2], versions=[2], staleness=[0])])
    assert table.recall("a", 1) == RememberedOutcome(2, 0)


def test_scopes_of_steps_are_remembered_with_outcomes() -> None:
    """A scope is remembered as long as the outcome of its push, also in a restored table."""
    table = SessionTable(max_outcomes=3)
    scopes = [None, Scope.of([1, 20]), None, Scope.of([2], of_tables=True)]
    for sequence, scope in enumerate(scopes, 1):
        table.remember("a", sequence, RememberedOutcome(sequence + 1, 0), scope)
    table.remember("b", 1, RememberedOutcome(9, 0))
    restored = SessionTable()
    restored.restore(table.export())
    for each in (table, restored):
        assert each.remembered() == [
            ("a", 2, scopes[1]),
            ("a", 3, None),
            ("a", 4, scopes[3]),
            ("b", 1, None),
        ]
        assert each.recall("a", 2) == RememberedOutcome(3, 0)
    assert [len(image.steps) for image in table.export()] == [3, 0]
    (torn, _) = table.export()
    del torn.steps[0]
    with pytest.raises(InternalError, match="session a are inconsistent"):
        restored.restore([torn])
