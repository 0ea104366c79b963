"""Leases for member keys: one a host, renewed while its members are heard of."""

import asyncio
import math

import structlog

from shoal_proto.errors import ShoalError
from shoal_server.etcd.api import KeyValueStore, LeaseId

log = structlog.get_logger(__name__)


class HostLeases:
    """A lease only speaks when coordinator and host are gone both: the coordinator itself removes
    the keys of members that it declares lost, so the TTL can be long and renewals rare."""

    def __init__(self, store: KeyValueStore, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = math.ceil(ttl_s)
        self._leases: dict[str, LeaseId] = {}
        self._heard: set[str] = set()
        self._granting = asyncio.Lock()

    async def of(self, host: str) -> LeaseId:
        """The lease for members on `host`, with its whole time before it."""
        async with self._granting:
            lease = self._leases.get(host)
            # The lease of a host that was silent runs out soon, or did already.
            if lease is None or await self._store.keep_alive(lease) <= 0:
                self._leases[host] = await self._store.grant(self._ttl_s)
            self._heard.add(host)
            return self._leases[host]

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
                    left_s = await self._store.keep_alive(lease)
                except ShoalError as error:
                    log.warning("lease_not_renewed", host=host, reason=str(error))
                    self._heard.add(host)
                    continue
                if left_s <= 0:
                    # Its keys are gone with it. The next admission takes a new lease; members
                    # that are still there are told by the fence.
                    log.warning("lease_expired", host=host)
                    self._leases.pop(host, None)
