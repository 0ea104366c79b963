"""Scope of a push's step: the ids of the shards that the step pushes to."""

import pytest

from shoal_proto.errors import MalformedMessage
from shoal_server.core.shards.steps import StepId
from shoal_server.parameters.shard.step_scope import MAX_SHARD_IDS, Scope, to_message


@pytest.mark.parametrize("of_tables", [False, True])
def test_a_scope_is_restored_from_its_message(of_tables: bool) -> None:
    scope = Scope.of([3, 70, 9], of_tables=of_tables)
    assert scope is not None and scope.shards == {3, 9, 70}
    message = to_message(scope)
    assert message is not None and Scope.from_message(message) == scope
    assert scope.step("a", 7) == StepId("tables:a" if of_tables else "a", 7)


def test_no_ids_are_no_scope() -> None:
    """A step without ids pushes to all dense shards."""
    assert Scope.of([]) is None and to_message(None) is None


def test_an_id_above_the_bound_is_refused() -> None:
    """A scope takes a bit of memory for every id up to its highest one."""
    with pytest.raises(MalformedMessage, match=f"saw shard {MAX_SHARD_IDS}"):
        Scope.of([1, MAX_SHARD_IDS])
