"""Acknowledgements: calls wait until an update is as safe as their sender demands."""

import asyncio
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, TypeVar

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import (
    AcknowledgeVersion,
    AckRefusalReason,
    RefuseVersion,
    SetLease,
)
from shoal_server.core.replication.protocol.events import AckAbandoned, AckLevel, AckRequested
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.shard.replica import ShardReplica

_LEVELS = {
    Acknowledgement.ACKNOWLEDGEMENT_APPLIED: AckLevel.APPLIED,
    Acknowledgement.ACKNOWLEDGEMENT_DURABLE: AckLevel.DURABLE,
}

AnswerT = TypeVar("AnswerT")


@dataclass(slots=True, eq=False)
class _Waiter:
    """A waiting call. This object is also its token in the core."""

    replica: ShardReplica
    answered: "asyncio.Future[Any]"
    """Resolves to `answer`, or to the reason why the version cannot become safe."""
    answer: object


class Acknowledgements:
    """Requests acknowledgements from the core of server `me`."""

    def __init__(self, driver: CoreDriver, me: Holder) -> None:
        self._driver = driver
        self._me = me
        self._loop = asyncio.get_running_loop()
        self._lease_ends_s = -inf

    async def wait(
        self, replica: ShardReplica, version: int, level: Acknowledgement.ValueType
    ) -> None:
        """Return once a version is safe to that level. Raises the reason if it cannot become safe;
        see `ShardLeadership.wait_acknowledged`."""
        outcome = await self.when_acknowledged(replica, version, level, None)
        if isinstance(outcome, ShoalError):
            raise outcome

    def when_acknowledged(
        self,
        replica: ShardReplica,
        version: int,
        level: Acknowledgement.ValueType,
        answer: AnswerT,
    ) -> "asyncio.Future[AnswerT | ShoalError]":
        """A future of `answer`, or of the error that `wait` would raise. Cancelling it frees the
        answer at once."""
        waiter = _Waiter(replica, self._loop.create_future(), answer)
        if not replica.is_led:
            waiter.answered.set_result(replica.deposed_error())
            return waiter.answered
        wanted = _LEVELS.get(level, AckLevel.REPLICATED)
        key = replica.job, replica.shard_id
        self._driver.submit_event(AckRequested(waiter, key, replica.epoch, version, wanted))
        if not waiter.answered.done():
            waiter.answered.add_done_callback(partial(self._abandon_if_cancelled, waiter))
        return waiter.answered

    def _abandon_if_cancelled(self, waiter: _Waiter, answered: "asyncio.Future[Any]") -> None:
        if answered.cancelled():
            # The core keeps an abandoned token until its version is safe, perhaps for minutes. The
            # answer may be large.
            waiter.answer = None
            key = waiter.replica.job, waiter.replica.shard_id
            self._driver.submit_event(AckAbandoned(waiter, key))

    def check_lease(self) -> None:
        """Raise Unavailable if other servers may have assumed this server dead."""
        if self._loop.time() >= self._lease_ends_s:
            raise self._fenced()

    def set_lease(self, effect: SetLease) -> None:
        self._lease_ends_s = effect.ends_s

    def acknowledge_version(self, effect: AcknowledgeVersion) -> None:
        waiter = effect.token
        if isinstance(waiter, _Waiter) and not waiter.answered.done():
            waiter.answered.set_result(waiter.answer)

    def refuse_version(self, effect: RefuseVersion) -> None:
        waiter = effect.token
        if isinstance(waiter, _Waiter) and not waiter.answered.done():
            waiter.answered.set_result(self._error(waiter.replica, effect.why))

    def _error(self, replica: ShardReplica, why: AckRefusalReason) -> ShoalError:
        if why is AckRefusalReason.DEPOSED:
            return replica.deposed_error()
        if why is AckRefusalReason.FENCED:
            return self._fenced()
        return replica.why_no_disk or replica.no_journal_error()

    def _fenced(self) -> Unavailable:
        server_id = self._me.server_id
        return Unavailable(
            f"server {server_id} acknowledges nothing: the coordinator may have given up this"
            " server",
            seen="its registration in etcd was not renewed for so long that its shards may have "
            "been given to others",
            expected="a registration that etcd has renewed",
            fix="The server goes on by itself once it reaches etcd; fetch the shard map and retry.",
        )
