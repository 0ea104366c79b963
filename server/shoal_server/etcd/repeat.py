"""Repetition of calls to etcd that must succeed, through outages and unknown outcomes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from shoal_proto.back_off import BackOff
from shoal_proto.errors import RetryError, ShoalError
from shoal_server.etcd.api import Compare, Keyspace, Operation, TransactionResult

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.5
"""Short, so that work goes on soon after an outage."""

T = TypeVar("T")


def is_transient(error: ShoalError) -> bool:
    return isinstance(error, RetryError)


def is_outcome_unknown(error: ShoalError) -> bool:
    """True if the transaction may have been carried out."""
    return error.details.get("outcome") == "unknown"


def new_pauses() -> BackOff:
    return BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)


async def until_answered(
    call: Callable[[], Awaitable[T]],
    on_failure: Callable[[ShoalError], object],
    is_retried: Callable[[ShoalError], bool] = is_transient,
) -> T:
    """Repeat a call, with pauses, until it returns. `on_failure` is called with each error that
    leads to a retry. Raises errors for which `is_retried` is False."""
    pauses = new_pauses()
    while True:
        try:
            return await call()
        except ShoalError as error:
            if not is_retried(error):
                raise
            on_failure(error)
        await asyncio.sleep(pauses.pause_s())


async def transact_until_known(
    store: Keyspace,
    compares: Sequence[Compare],
    then: Sequence[Operation],
    otherwise: Sequence[Operation] = (),
) -> TransactionResult:
    """Repeat a transaction until its outcome is known. It must be idempotent: several attempts may
    be carried out. Raises what the store raises. A RetryError then concerns the last attempt
    only: an earlier one may have been carried out."""
    while True:
        try:
            return await store.transact(compares, then, otherwise)
        except RetryError as error:
            if not is_outcome_unknown(error):
                raise
