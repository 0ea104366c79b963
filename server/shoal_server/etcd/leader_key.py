"""The leader's key in etcd: reading it, watching it, and ending another coordinator's term."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    NO_LEASE,
    Delete,
    KeyValueStore,
    LeaseId,
    Put,
    Revision,
    created_at,
    unchanged_since,
)
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.etcd.mirror import follow_key
from shoal_server.etcd.repeat import until_answered

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaderCandidate:
    """A coordinator's description of itself, which it writes to the leader's key when it leads."""

    address: str
    """host:port of the gRPC service, as other processes reach it."""
    http_url: str = ""
    """Base URL of the status endpoint."""
    host: str = ""
    """Name of the machine or container: two machines may advertise the same address, such as
    127.0.0.1."""

    def put(self, lease: LeaseId) -> Put:
        """The write that makes this candidate the leader."""
        record = {"address": self.address, "http_url": self.http_url, "host": self.host}
        return Put(keys.LEADER, json.dumps(record).encode(), lease)


@dataclass(frozen=True, kw_only=True)
class Leader(LeaderCandidate):
    """The leader, and the revision since which it leads. Its texts are empty if its record cannot
    be read."""

    create_revision: Revision


async def read(store: KeyValueStore) -> Leader | None:
    """Read the leader; None if there is none. Raises what the store raises."""
    found = await store.get(keys.LEADER)
    return None if found is None else parsed(found.value, found.create_revision)


async def follow(
    store: KeyValueStore, after: Revision | None = None
) -> AsyncGenerator[Leader | None, None]:
    """Yield the leader (None: there is none), and again after changes of the key, for ever.

    Of changes that arrive together, only the last is yielded. With `after`, only changes after that
    revision are. The key is written once a term, so its last write is its creation. Raises what the
    store raises.
    """
    async with aclosing(follow_key(store, keys.LEADER, after)) as items:
        async for item in items:
            yield None if item is None else parsed(item.value, item.mod_revision)


async def end_term(store: KeyValueStore, leader: Leader) -> bool:
    """Delete the key if it is still that leader's; return True if the last attempt deleted it.

    Retries through outages, and raises other errors. If an attempt deleted the key but its answer
    was lost, the next attempt finds nothing to delete, and the result is False.

    Safe even if that leader is alive: the leader watches its key, and each of its writes compares
    the revision that this deletion compares, so the leader writes nothing more.
    """
    condition = created_at(keys.LEADER, leader.create_revision)
    # If the outcome is unknown, the next attempt finds the key deleted or deletes it.
    result = await until_answered(
        lambda: store.transact((condition,), (Delete(keys.LEADER),)),
        lambda error: log.warning("term_not_ended", leader=leader.address, reason=str(error)),
    )
    return result.succeeded


async def delete_unleased(store: KeyValueStore) -> None:
    """Delete a leader's key without a lease: no candidate wrote such a key, and it would exist for
    ever. The term of a leader whose key was overwritten has ended. Raises what the store raises."""
    found = await store.get(keys.LEADER)
    if found is None or found.lease != NO_LEASE:
        return
    still = unchanged_since(keys.LEADER, found.mod_revision)
    ended = (await store.transact((still,), (Delete(keys.LEADER),))).succeeded
    log.error("leader_record_without_lease", value=found.value[:200], deleted=ended)


def parsed(value: bytes, created: Revision) -> Leader:
    """Leader that the key's value names; without texts if the value cannot be read."""
    try:
        record = Fields.parsed(value)
        address, http_url = record.text("address"), record.text("http_url")
        host = record.text("host", "")
    except UnreadableRecord as error:
        # There is a leader, or the key would not exist; only its address is unknown.
        log.error("leader_record_unreadable", value=value[:200], error=str(error))
        address = http_url = host = ""
    return Leader(address=address, http_url=http_url, host=host, create_revision=created)
