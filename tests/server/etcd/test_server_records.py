"""Records of parameter servers: read as written, although others are unreadable."""

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import InternalError
from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.records import servers
from shoal_server.parameters.cluster.registration import ServerIdentity

IDENTITY = ServerIdentity(holder=Holder("ps-0", "one"), address="10.0.0.1:7710", started_unix_s=1e9)


@pytest.mark.parametrize("leaving", [False, True])
def test_a_server_record_is_read_as_written(leaving: bool) -> None:
    """The record has the server's holder, its address, and if the server is leaving."""
    found = servers.parse(keys.server("ps-0"), IDENTITY.record(leaving=leaving))
    assert found.holder == IDENTITY.holder
    assert (found.address, found.is_leaving) == (IDENTITY.address, leaving)


@pytest.mark.parametrize("value", [b"", b"[]", b"7", b"{}", b"\xff"])
async def test_an_unreadable_record_hides_no_other(value: bytes) -> None:
    """A reader of this record alone gets an error with the server's id."""
    with pytest.raises(InternalError, match="ps-9"):
        servers.parse(keys.server("ps-9"), value)
    store = MemoryStore()
    await store.put(keys.server("ps-9"), value)
    await store.put(keys.server("ps-0"), IDENTITY.record())
    assert [server.holder for server in await servers.read(store)] == [IDENTITY.holder]
    await store.close()
