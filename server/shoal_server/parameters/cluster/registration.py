"""Registration of a parameter server: a key in etcd under its lease."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from shoal_proto.errors import AddressInUse, LeaseExpired, RetryError
from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import NO_LEASE, Get, KeyValueStore, LeaseId, Put, value_is
from shoal_server.etcd.api import absent as is_absent
from shoal_server.etcd.mirror import follow_key
from shoal_server.etcd.records import ended_servers
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerIdentity:
    holder: Holder
    address: str
    """host:port for workers and other servers."""
    started_unix_s: float
    torch_version: str = ""

    @property
    def server_id(self) -> str:
        return self.holder.server_id

    def record(self, *, leaving: bool = False) -> bytes:
        return json.dumps(
            {
                "address": self.address,
                "incarnation": self.holder.incarnation,
                "started_unix_s": self.started_unix_s,
                "leaving": leaving,
                "torch": self.torch_version,
            }
        ).encode()


class Registration:
    """Registers the server on entry, renews its lease, and removes its key on exit.

    If the lease is lost, the server registers again. Only one server has an id at a time: a second
    one waits until the first one's lease has ended. After three times the lease's length,
    AddressInUse is raised on entry or by `wait_failed`. Entry also raises what the store raises.
    """

    def __init__(
        self,
        store: KeyValueStore,
        identity: ServerIdentity,
        lease_ttl_s: float = 5.0,
        *,
        on_renewed: Callable[[float], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_renewed` is called after each registration and renewal, with the event loop's time
        before its request was sent. `on_end` is called before the key is removed: no push may be
        acknowledged afterwards."""
        self._store = store
        self._on_renewed = on_renewed
        self._on_end = on_end
        self._identity = identity
        self._lease_ttl_s = lease_ttl_s
        self._lease: LeaseId = NO_LEASE
        self._leaving = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Registration":
        await self._register()
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        await cancel(self._task)
        self._on_end()
        try:
            await ended_servers.note(self._store, self._identity.holder)
            await self._store.revoke(self._lease)
        except RetryError as error:
            # etcd is unreachable: the lease expires by itself.
            log.warning("lease_not_revoked", server_id=self._identity.server_id, reason=str(error))

    async def announce_leaving(self) -> None:
        """Ask the coordinator to move this server's shards away. If the registration is lost, the
        next registration asks again. Raises RetryError."""
        self._leaving = True
        key = keys.server(self._identity.server_id)
        # The record of a later process under this id must not be replaced.
        is_mine = value_is(key, self._identity.record())
        put = Put(key, self._identity.record(leaving=True), self._lease)
        await self._store.transact([is_mine], [put])

    async def wait_failed(self) -> None:
        assert self._task is not None
        await asyncio.shield(self._task)

    async def _register(self) -> None:
        key = keys.server(self._identity.server_id)
        while not await self._claimed_in_time(key):
            log.warning("server_registration_late", server_id=self._identity.server_id)
        log.info(
            "parameter_server_registered",
            server_id=self._identity.server_id,
            address=self._identity.address,
        )

    async def _claimed_in_time(self, key: str) -> bool:
        """Claim the key; False if etcd was too slow. Raises AddressInUse if another server keeps
        the id, and what the store raises."""
        try:
            async with asyncio.timeout(3 * self._lease_ttl_s):
                while not await self._claim(key):
                    await self._wait_vanished(key)
            return True
        except TimeoutError:
            holder = await self._store.get(key)
        if holder is None or holder.value in self._own_records:
            # No other server has the key: etcd was unreachable or restarted, and answers again.
            return False
        raise AddressInUse(
            f"another parameter server holds the id {self._identity.server_id}",
            seen=holder.value.decode(errors="replace"),
            expected="a different id for each server",
            fix="Stop the other server, or choose another --id.",
        )

    @property
    def _own_records(self) -> tuple[bytes, bytes]:
        return self._identity.record(), self._identity.record(leaving=True)

    async def _claim(self, key: str) -> bool:
        sent_s = asyncio.get_running_loop().time()
        if self._lease == NO_LEASE or await self._store.keep_alive(self._lease) <= 0.0:
            self._lease = await self._store.grant(self._lease_ttl_s)
        put = Put(key, self._identity.record(leaving=self._leaving), self._lease)
        result = await self._store.transact([is_absent(key)], [put], [Get(key)])
        # The answer to an earlier attempt may have been lost.
        is_ours = result.succeeded or any(item.lease == self._lease for item in result.reads[0])
        if is_ours:
            self._on_renewed(sent_s)
        return is_ours

    async def _wait_vanished(self, key: str) -> None:
        async with aclosing(follow_key(self._store, key)) as states:
            async for item in states:
                if item is None:
                    return

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ttl_s / 3)
            try:
                sent_s = asyncio.get_running_loop().time()
                if await self._store.keep_alive(self._lease) <= 0.0:
                    log.warning("lease_lost", server_id=self._identity.server_id)
                    self._lease = NO_LEASE
                    await self._register()
                else:
                    self._on_renewed(sent_s)
            except (RetryError, LeaseExpired) as error:
                # Shards are still served; the next round tries again.
                log.warning(
                    "lease_not_renewed", server_id=self._identity.server_id, reason=str(error)
                )
