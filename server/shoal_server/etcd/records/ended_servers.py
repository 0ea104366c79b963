"""Server processes known to have ended, which acknowledge no further push. Other processes without
a lease count as dead only after DEAD_AFTER_S."""

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import DEAD_AFTER_S
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace, KeyValueStore

KEPT_S = 2 * DEAD_AFTER_S
"""Lifetime of a record. Later, a server that etcd does not list counts as dead anyway."""


async def note(store: KeyValueStore, ended: Holder) -> None:
    """Record the end of a server process. The caller must be this process, once it acknowledges no
    further push, or must have seen the process end."""
    lease = await store.grant(KEPT_S)
    await store.put(keys.ended_server(ended.server_id, ended.incarnation), b"{}", lease)


async def read(store: Keyspace) -> frozenset[Holder]:
    found = set()
    for key in await store.keys(keys.ENDED_SERVERS):
        server_id, _, incarnation = key.removeprefix(keys.ENDED_SERVERS).rpartition("/")
        found.add(Holder(server_id, incarnation))
    return frozenset(found)
