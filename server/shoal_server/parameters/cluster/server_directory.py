"""Which parameter servers there are, and where: followed in etcd."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.shards.assignments import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, KeyValueStore, Revision
from shoal_server.etcd.records.servers import Server, parse_all

log = structlog.get_logger(__name__)


class ServerDirectory:
    """As of the newest event seen; while etcd is away, as of before."""

    def __init__(self, store: KeyValueStore, on_change: Callable[[], None]) -> None:
        self._store = store
        self._servers: dict[str, Server] = {}
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ServerDirectory":
        snapshot = await self._store.range(keys.SERVERS)
        for item in snapshot.items:
            self._put(item.key, item.value)
        self._task = asyncio.create_task(self._follow(snapshot.revision), name="servers")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def has_others(self, me: Holder) -> bool:
        """Whether a server is there beside this one that does not leave too."""
        others = (s for name, s in self._servers.items() if name != me.server_id)
        return any(not server.is_leaving for server in others)

    def address(self, holder: Holder) -> str | None:
        """Where that process is reached; None if it is not registered, or another one is."""
        server = self._servers.get(holder.server_id)
        return server.address if server is not None and server.holder == holder else None

    async def find(self, holder: Holder) -> str | None:
        """The same, asking etcd about a holder that is not known. Raises what the store raises."""
        address = self.address(holder)
        if address is None:
            found = await self._store.get(keys.server(holder.server_id))
            if found is not None:
                self._put(found.key, found.value)
                address = self.address(holder)
        return address

    async def reach(self, holder: Holder) -> str | None:
        """The same; while etcd is away, as far as is known."""
        try:
            return await self.find(holder)
        except RetryError as error:
            log.warning("server_not_looked_up", server=holder.server_id, reason=str(error))
            return self.address(holder)

    async def _follow(self, revision: int) -> None:
        watch = self._store.watch(keys.SERVERS, Revision(revision + 1))
        async with aclosing(watch) as batches:
            async for batch in batches:
                for event in batch.events:
                    if event.kind is EventKind.DELETE:
                        self._servers.pop(event.key.removeprefix(keys.SERVERS), None)
                    else:
                        self._put(event.key, event.value)
                    self._on_change()

    def _put(self, key: str, value: bytes) -> None:
        for server in parse_all({key: value}):
            self._servers[server.holder.server_id] = server
