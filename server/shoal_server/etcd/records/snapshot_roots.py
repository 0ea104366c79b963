"""URLs below which the operator allows snapshots.

Servers open URLs that a caller gives, and check them against this key. Only leading coordinators
write it.
"""

import json
from collections.abc import Sequence

from shoal_proto.errors import InternalError
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace, Put
from shoal_server.etcd.json_fields import Fields, UnreadableRecord


async def write(store: Keyspace, urls: Sequence[str]) -> None:
    value = json.dumps({"urls": list(urls)}).encode()
    await store.transact([], [Put(keys.SNAPSHOT_ROOTS, value)])


async def read(store: Keyspace) -> Sequence[str]:
    """The allowed roots; empty before a coordinator has led. Raises InternalError if they do not
    parse."""
    found = await store.get(keys.SNAPSHOT_ROOTS)
    if found is None:
        return ()
    try:
        return Fields.parsed(found.value).texts("urls")
    except UnreadableRecord as error:
        raise InternalError(
            "the roots of snapshots in etcd do not parse",
            seen=f"{found.value[:80]!r}, {error}",
            expected='{"urls": [...]}',
        ) from error
