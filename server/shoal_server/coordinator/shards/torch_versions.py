"""Check that all parameter servers run the same torch."""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import structlog

from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.mirror import PrefixMirror
from shoal_server.etcd.records.servers import Server, parse

log = structlog.get_logger(__name__)


class TorchVersions:
    """Logs a warning if servers run different versions of torch, once for each change of mixture.

    Mixtures are allowed, since servers are upgraded one after the other and each version computes
    correctly. But a kernel may round differently in another version, so that a copy may differ from
    its primary in the last bits.
    """

    def __init__(self) -> None:
        self._logged: dict[str, list[str]] = {}

    def note(self, servers: Iterable[Server]) -> None:
        """Note all live servers; log a warning if their torch versions differ."""
        by_version: dict[str, list[str]] = defaultdict(list)
        for server in servers:
            if server.torch_version:
                by_version[server.torch_version].append(server.holder.server_id)
        versions = {version: sorted(by_version[version]) for version in sorted(by_version)}
        if len(versions) > 1 and versions != self._logged:
            log.warning(
                "torch_versions_differ",
                servers=versions,
                reason="copies of a shard may differ in the last bits from its primary",
                fix="Run the same version of torch on every parameter server.",
            )
        self._logged = versions


@asynccontextmanager
async def watching_torch_versions(store: Keyspace) -> AsyncIterator[None]:
    """Follow the registered servers during the block, and note their versions."""
    versions = TorchVersions()
    servers: PrefixMirror[Server] = PrefixMirror(
        store,
        keys.SERVERS,
        lambda item: parse(item.key, item.value),
        on_change=lambda: versions.note(servers.records.values()),
        resync=True,
    )
    async with servers:
        yield
