"""Calls to etcd that are repeated until they succeed."""

from collections.abc import Sequence

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import AccessDenied, NotLeader, ShoalError, Unavailable
from shoal_server.etcd import repeat
from shoal_server.etcd.api import Compare, Operation, Put, TransactionResult, absent
from shoal_server.etcd.repeat import transact_until_known, until_answered

AWAY = Unavailable("no etcd answered")
UNKNOWN = Unavailable("the connection broke", details={"outcome": "unknown"})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "FIRST_PAUSE_S", 0.0)


class Failing:
    """A call that raises these errors, one at each attempt, and then returns 7."""

    def __init__(self, *errors: ShoalError) -> None:
        self.errors = list(errors)

    async def __call__(self) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return 7


async def test_a_call_is_repeated_until_it_is_answered() -> None:
    """Each failure is reported to the caller, for its log."""
    seen: list[ShoalError] = []
    assert await until_answered(Failing(AWAY, UNKNOWN), seen.append) == 7
    assert seen == [AWAY, UNKNOWN]


async def test_a_refusal_ends_the_repetition() -> None:
    """Only a RetryError is repeated by default; a caller may choose otherwise."""
    denied, seen = AccessDenied("no permission"), list[ShoalError]()
    with pytest.raises(AccessDenied):
        await until_answered(Failing(AWAY, denied), seen.append)
    assert seen == [AWAY]
    both = Failing(denied, NotLeader("another leads"))
    with pytest.raises(NotLeader):
        await until_answered(both, seen.append, lambda error: error is denied)


class Breaking(MemoryStore):
    """A store whose first transactions are carried out, and then raise these errors."""

    def __init__(self, *errors: ShoalError) -> None:
        super().__init__()
        self.errors = list(errors)

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        result = await super().transact(compares, then, otherwise)
        if self.errors:
            raise self.errors.pop(0)
        return result


async def test_a_transaction_is_repeated_while_its_outcome_is_unknown() -> None:
    """The last attempt's result is returned: here an earlier attempt has made the key."""
    result = await transact_until_known(Breaking(UNKNOWN), [absent("a")], [Put("a", b"1")])
    assert not result.succeeded


async def test_a_transaction_that_was_not_carried_out_is_not_repeated() -> None:
    store = Breaking(UNKNOWN, AWAY)
    with pytest.raises(Unavailable) as raised:
        await transact_until_known(store, [], [Put("a", b"1")])
    assert raised.value is AWAY
