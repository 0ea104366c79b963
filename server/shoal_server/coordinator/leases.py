"""Leases for member keys: one a host, renewed while its members are heard of."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable

import structlog

from shoal_proto.errors import ShoalError
from shoal_server.etcd.api import KeyValueStore, LeaseId

log = structlog.get_logger(__name__)

MAX_AT_A_TIME = 64
"""Calls to etcd for leases that are under way at once."""


class HostLeases:
    """A lease only speaks when coordinator and host are gone both: the coordinator itself removes
    the keys of members that it declares lost, so the TTL can be long and renewals rare."""

    def __init__(
        self,
        store: KeyValueStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._ttl_s = math.ceil(ttl_s)
        self._clock = clock
        self._leases: dict[str, LeaseId] = {}
        self._renewed_s: dict[str, float] = {}
        self._heard: set[str] = set()
        self._under_way: dict[str, asyncio.Task[LeaseId]] = {}

    async def of(self, host: str) -> LeaseId:
        """The lease for members on `host`, with at least two thirds of its time before it."""
        self._heard.add(host)
        lease = self._leases.get(host)
        renewed_s = self._renewed_s.get(host, -math.inf)
        if lease is not None and self._clock() - renewed_s < self._ttl_s / 3:
            return lease
        # Members of several jobs may ask at once; the host has one lease for all.
        task = self._under_way.get(host)
        if task is None:
            task = self._under_way[host] = asyncio.ensure_future(self._fresh(host))
            task.add_done_callback(lambda _: self._under_way.pop(host))
        return await asyncio.shield(task)

    async def of_all(self, hosts: Iterable[str]) -> dict[str, LeaseId]:
        """The leases of several hosts. Raises what etcd answers to any of them."""
        names = list(hosts)
        found: dict[str, LeaseId] = {}
        for start in range(0, len(names), MAX_AT_A_TIME):
            part = names[start : start + MAX_AT_A_TIME]
            leases = await asyncio.gather(*(self.of(host) for host in part), return_exceptions=True)
            for host, lease in zip(part, leases, strict=True):
                if isinstance(lease, BaseException):
                    raise lease
                found[host] = lease
        return found

    def forget(self, hosts: Iterable[str]) -> None:
        """Their leases turned out to be gone: the next members get new ones."""
        for host in hosts:
            self._leases.pop(host, None)

    async def _fresh(self, host: str) -> LeaseId:
        lease = self._leases.get(host)
        # The lease of a host that was silent runs out soon, or did already.
        if lease is None or not await self._renew(host, lease):
            asked_s = self._clock()
            lease = await self._store.grant(self._ttl_s)
            self._leases[host], self._renewed_s[host] = lease, asked_s
        return lease

    async def _renew(self, host: str, lease: LeaseId) -> bool:
        asked_s = self._clock()
        left_s = await self._store.keep_alive(lease)
        if left_s <= 0:
            return False
        self._renewed_s[host] = asked_s
        return True

    def heard_of(self, host: str) -> None:
        """A member on the host gave a sign of life."""
        self._heard.add(host)

    async def renew_for_ever(self) -> None:
        """Renew what was heard of; a host that was silent for a whole TTL loses its lease."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            heard, self._heard = self._heard, set()
            for host in heard:
                lease = self._leases.get(host)
                if lease is None:
                    continue
                try:
                    renewed = await self._renew(host, lease)
                except ShoalError as error:
                    log.warning("lease_not_renewed", host=host, reason=str(error))
                    self._heard.add(host)
                    continue
                if not renewed:
                    # Its keys are gone with it. The next admission takes a new lease; members
                    # that are still there are told by the fence.
                    log.warning("lease_expired", host=host)
                    if self._leases.get(host) == lease:
                        del self._leases[host]
            self._drop_expired()

    def _drop_expired(self) -> None:
        """Nobody on these hosts was heard of for a whole TTL."""
        now_s = self._clock()
        gone = [host for host, at_s in self._renewed_s.items() if now_s - at_s > self._ttl_s]
        for host in gone:
            self._leases.pop(host, None)
            del self._renewed_s[host]
