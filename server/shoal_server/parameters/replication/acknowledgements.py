"""Waiting until an update is as safe as its sender asked for."""

import asyncio
from dataclasses import dataclass

from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_server.core.replication.protocol.effects import Acknowledge, Refusal, Refuse
from shoal_server.core.replication.protocol.events import Abandoned, Asked, Level
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.shard.replica import ShardReplica

_LEVELS = {
    Acknowledgement.ACKNOWLEDGEMENT_APPLIED: Level.APPLIED,
    Acknowledgement.ACKNOWLEDGEMENT_DURABLE: Level.DURABLE,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """The token of one who waits."""

    replica: ShardReplica
    answered: "asyncio.Future[None]"


class Acknowledgements:
    """Lives on the event loop."""

    def __init__(self, driver: CoreDriver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        driver.carry_out({Acknowledge: self._acknowledge, Refuse: self._refuse})

    def is_there(
        self, replica: ShardReplica, version: int, level: Acknowledgement.ValueType
    ) -> bool:
        """Whether `wait` would return at once."""
        core = self._driver.core
        led = core.led((replica.job, replica.shard_id))
        return (
            led is not None
            and led.epoch == replica.epoch
            and core.may_acknowledge(self._loop.time())
            and led.is_as_safe(version, _LEVELS.get(level, Level.REPLICATED))
        )

    async def wait(
        self, replica: ShardReplica, version: int, level: Acknowledgement.ValueType
    ) -> None:
        """Return once a version of a shard is as safe as that. Raises what makes it impossible."""
        key = replica.job, replica.shard_id
        waiter = _Waiter(replica, self._loop.create_future())
        wanted = _LEVELS.get(level, Level.REPLICATED)
        self._driver.tell(Asked(waiter, key, replica.epoch, version, wanted))
        if waiter.answered.done():
            waiter.answered.result()
            return
        try:
            await waiter.answered
        except asyncio.CancelledError:
            self._driver.tell(Abandoned(waiter, key))
            raise

    def check_lease(self) -> None:
        """Raise Unavailable while this server may have been taken for dead."""
        if not self._driver.core.may_acknowledge(self._loop.time()):
            raise self._fenced()

    def _acknowledge(self, effect: Acknowledge) -> None:
        waiter = effect.token
        if isinstance(waiter, _Waiter) and not waiter.answered.done():
            waiter.answered.set_result(None)

    def _refuse(self, effect: Refuse) -> None:
        waiter = effect.token
        if isinstance(waiter, _Waiter) and not waiter.answered.done():
            waiter.answered.set_exception(self._error(waiter.replica, effect.why))

    def _error(self, replica: ShardReplica, why: Refusal) -> ShoalError:
        if why is Refusal.DEPOSED:
            return replica.deposed()
        if why is Refusal.FENCED:
            return self._fenced()
        return replica.why_no_disk or replica.on_no_disk()

    def _fenced(self) -> Unavailable:
        server_id = self._driver.core.me.server_id
        return Unavailable(
            f"server {server_id} acknowledges nothing: it may have been taken for dead",
            seen="no renewal of its registration in etcd for so long that its shards may have been"
            " given to others",
            expected="a registration that etcd has renewed",
            fix="It goes on by itself once it reaches etcd; retry, after fetching the shard map.",
        )
