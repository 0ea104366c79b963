"""Addresses of parameter servers, followed in etcd."""

from collections.abc import Callable

from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.mirror import PrefixMirror
from shoal_server.etcd.records.servers import Server, parse


class ServerDirectory:
    def __init__(self, store: KeyValueStore, on_change: Callable[[], object]) -> None:
        self._servers: PrefixMirror[Server] = PrefixMirror(
            store, keys.SERVERS, lambda item: parse(item.key, item.value), on_change=on_change
        )

    async def __aenter__(self) -> "ServerDirectory":
        await self._servers.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._servers.__aexit__(*exc)

    def has_others(self, me: Holder) -> bool:
        """True if another server is registered, and is not leaving."""
        servers = self._servers.records.items()
        return any(not server.is_leaving for name, server in servers if name != me.server_id)

    def address(self, holder: Holder) -> str | None:
        """The address of `holder`; None if another process, or none, is registered under its id."""
        server = self._servers.get(holder.server_id)
        return server.address if server is not None and server.holder == holder else None

    def address_of(self, server_id: str) -> str | None:
        """The address registered under `server_id`; None if there is none."""
        server = self._servers.get(server_id)
        return None if server is None else server.address

    def staying_address_of(self, server_id: str) -> str | None:
        """`address_of`; None also if the server is leaving."""
        server = self._servers.get(server_id)
        return None if server is None or server.is_leaving else server.address

    async def find_address(self, holder: Holder) -> str | None:
        """`address`, looked up in etcd if it is unknown. Raises RetryError if etcd cannot be
        reached."""
        if self.address(holder) is None:
            await self._servers.look_up(holder.server_id)
        return self.address(holder)
