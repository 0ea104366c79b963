"""The server's interface to etcd.

`remote.client.EtcdClient` implements it for a cluster, `MemoryStore` of tests/support for tests and
simulation; both pass the contract suite in tests/server/etcd/.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from shoal_proto.errors import InvalidSpec

Revision = NewType("Revision", int)
LeaseId = NewType("LeaseId", int)

NO_LEASE = LeaseId(0)


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: Revision
    mod_revision: Revision
    version: int
    """Number of writes since the key was created."""
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix, in order, as of one revision."""

    revision: Revision
    items: tuple[KeyValue, ...]


class EventKind(Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    kind: EventKind
    key: str
    value: bytes
    mod_revision: Revision


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes of one or more whole revisions, in order.

    `reset` is set if the changes since the last batch were compacted, and for the first listing of
    `mirror.list_and_watch`. The events are then puts of all keys that exist at `revision`, in key
    order.
    """

    revision: Revision
    events: tuple[WatchEvent, ...]
    reset: bool = False

    @classmethod
    def of_listing(cls, listed: RangeResult) -> "WatchBatch":
        """A listing as a batch with `reset`."""
        puts = (WatchEvent(EventKind.PUT, i.key, i.value, i.mod_revision) for i in listed.items)
        return cls(listed.revision, tuple(puts), reset=True)


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction; use the constructors below."""

    key: str
    field: str
    """"value", "mod_revision" or "create_revision"."""
    expected: bytes | int
    prefix: bool = False
    """True: the mod_revision of every key under the prefix `key` is at most `expected`. `field`
    must be "mod_revision"."""


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "value", value)


def unchanged_since(key: str, mod_revision: Revision) -> Compare:
    """Condition that the key was last written at `mod_revision` (0: it does not exist)."""
    return Compare(key, "mod_revision", int(mod_revision))


def none_written_after(prefix: str, revision: Revision) -> Compare:
    """Condition that no key under the prefix was written after `revision`. Deletions are not
    detected."""
    return Compare(prefix, "mod_revision", int(revision), prefix=True)


def created_at(key: str, create_revision: Revision) -> Compare:
    return Compare(key, "create_revision", int(create_revision))


def absent(key: str) -> Compare:
    return Compare(key, "create_revision", 0)


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    key: str
    prefix: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """Outcome of a transaction. `reads` has the answers to the Get operations that ran, in
    order."""

    succeeded: bool
    revision: Revision
    reads: tuple[tuple[KeyValue, ...], ...]


def holds(compare: Compare, item: KeyValue | None) -> bool:
    """True if the condition, not one on a prefix, holds for the key's item (None: no such key).
    Raises InvalidSpec for an unknown field."""
    match compare.field:
        case "value":
            return item is not None and item.value == compare.expected
        case "mod_revision" | "create_revision":
            seen = 0 if item is None else getattr(item, compare.field)
            return bool(seen == compare.expected)
    raise InvalidSpec(
        "a transaction compares an unknown field",
        seen=compare.field,
        expected="value, mod_revision or create_revision",
    )


class Keyspace(Protocol):
    """Keys, as text, with values in bytes.

    A call retries through failures of endpoints and elections in etcd for about the client's
    `timeout_s` (`transact`: up to twice that), then raises `Unavailable`. It raises etcd's refusals
    at once, such as `AccessDenied`, `Overloaded` and `LeaseExpired`. If the connection breaks after
    `transact` has sent a write, it raises `DeadlineExceeded` or `Unavailable` with
    `details["outcome"] == "unknown"`, and the caller must read back.
    """

    async def get(self, key: str) -> KeyValue | None: ...

    async def range(self, prefix: str) -> RangeResult: ...

    async def keys(self, prefix: str) -> tuple[str, ...]:
        """List all keys under a prefix, in order.

        Keys are read in pages, each as of its own request, so they are not one snapshot.
        """
        ...

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult: ...

    def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        """Watch every change under `prefix` from revision `start` on, each exactly once.

        If undelivered changes were compacted, a batch with `reset` takes their place. Survives
        restarts of etcd and lost endpoints. Ends when closed or cancelled, or by raising a refusal
        of etcd, or CorruptError if etcd's revision is below the last one delivered (before the
        first one: below `start - 1`). Raises InvalidSpec for a start below 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConfirmedRenewal:
    """A renewal that the store confirmed: its sending (`time.monotonic`), and the TTL in the
    answer."""

    sent_s: float
    ttl_s: float


class Renewal(Protocol):
    @property
    def confirmed(self) -> ConfirmedRenewal | None: ...

    def report_alive(self) -> None:
        """Report that the event loop runs. Without reports, renewals pause after some time."""
        ...

    def end(self) -> None: ...


class KeyValueStore(Keyspace, Protocol):
    """A linearizable store with leases and watches. `put` and `delete` are repeated if an answer
    was lost, and may then undo another client's write in between."""

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision: ...

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete the key, or all keys under a prefix. Returns the number deleted by the last
        attempt: 0 if an earlier one deleted all and its answer was lost."""
        ...

    async def grant(self, ttl_s: float) -> LeaseId:
        """Create a lease. The TTL is rounded up to whole seconds and etcd's minimum."""
        ...

    async def keep_alive(self, lease: LeaseId) -> float:
        """Renew once, and return the TTL left; 0.0 if the lease is gone."""
        ...

    def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
        """Renew the lease until `end`, or until it is gone, even while the event loop is busy."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease and delete its keys; a lease that is gone is not an error."""
        ...

    async def close(self) -> None: ...
