"""The leader's key in etcd, with the value {"address", "http_url", "host"} as JSON. Calls raise
what their store raises."""

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
    address: str
    """host:port of the gRPC service."""
    http_url: str = ""
    host: str = ""
    """Name of the machine or container, since two of them may advertise the same address, such as
    127.0.0.1."""

    def put(self, lease: LeaseId) -> Put:
        record = {"address": self.address, "http_url": self.http_url, "host": self.host}
        return Put(keys.LEADER, json.dumps(record).encode(), lease)


@dataclass(frozen=True, kw_only=True)
class Leader(LeaderCandidate):
    """The leader, and the revision since which it leads. Texts are empty if the record cannot be
    read."""

    create_revision: Revision


async def read(store: KeyValueStore) -> Leader | None:
    found = await store.get(keys.LEADER)
    return None if found is None else parsed(found.value, found.create_revision)


async def follow(
    store: KeyValueStore, after: Revision | None = None
) -> AsyncGenerator[Leader | None, None]:
    """Yield the leader (None: there is none), and again after changes.

    Of changes that arrive together, only the last is yielded. `after`: only changes after that
    revision.
    """
    async with aclosing(follow_key(store, keys.LEADER, after)) as items:
        async for item in items:
            yield None if item is None else parsed(item.value, item.mod_revision)


async def end_term(store: KeyValueStore, leader: Leader) -> bool:
    """Delete the key if it is still that leader's; True if the last attempt deleted it.

    Retries through outages. If the answer to a deletion was lost, the result is False.

    Safe even if that leader is alive: its writes compare the same revision, and fail.
    """
    condition = created_at(keys.LEADER, leader.create_revision)
    result = await until_answered(
        lambda: store.transact((condition,), (Delete(keys.LEADER),)),
        lambda error: log.warning("term_not_ended", leader=leader.address, reason=str(error)),
    )
    return result.succeeded


async def delete_unleased(store: KeyValueStore) -> None:
    """Delete a leader's key without a lease, which no candidate wrote and which would exist for
    ever. If it has overwritten a leader's key, that leader's term has ended."""
    found = await store.get(keys.LEADER)
    if found is None or found.lease != NO_LEASE:
        return
    still = unchanged_since(keys.LEADER, found.mod_revision)
    ended = (await store.transact((still,), (Delete(keys.LEADER),))).succeeded
    log.error("leader_record_without_lease", value=found.value[:200], deleted=ended)


def parsed(value: bytes, created: Revision) -> Leader:
    try:
        record = Fields.parsed(value)
        address, http_url = record.text("address"), record.text("http_url")
        host = record.text("host", "")
    except UnreadableRecord as error:
        # The key exists, so there is a leader; only its address is unknown.
        log.error("leader_record_unreadable", value=value[:200], error=str(error))
        address = http_url = host = ""
    return Leader(address=address, http_url=http_url, host=host, create_revision=created)
