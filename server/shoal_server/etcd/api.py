"""The server's interface to etcd, as one Protocol.

`remote.client.EtcdClient` talks to a real cluster; `memory.MemoryStore` is a test double for unit
tests and simulation. Both pass the contract suite in tests/server/etcd/.
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
    """A key and its value, as of one revision."""

    key: str
    value: bytes
    create_revision: Revision
    mod_revision: Revision
    version: int
    """Writes since the key was created, from 1."""
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class RangeResult:
    """All keys under a prefix, in key order, as of one revision."""

    revision: Revision
    items: tuple[KeyValue, ...]


class EventKind(Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of one key."""

    kind: EventKind
    key: str
    value: bytes
    mod_revision: Revision


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes of one or more whole revisions, in order; never a part of a revision.

    `reset` is set when history was compacted beyond the point that the watch had reached, and for
    the first listing of `mirror.list_and_watch`. The events then are puts of every key that exists
    at `revision`, in key order: a key that is not among them does not exist.
    """

    revision: Revision
    events: tuple[WatchEvent, ...]
    reset: bool = False

    @classmethod
    def of_listing(cls, listed: RangeResult) -> "WatchBatch":
        """The listed keys as a batch with `reset`."""
        puts = (WatchEvent(EventKind.PUT, i.key, i.value, i.mod_revision) for i in listed.items)
        return cls(listed.revision, tuple(puts), reset=True)


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction on one key; use the constructors below."""

    key: str
    field: str
    """"value", "mod_revision", "create_revision" or "version"."""
    expected: bytes | int
    prefix: bool = False
    """True for the condition that the mod_revision of every key under the prefix `key` is at most
    `expected`. Only `field` "mod_revision" has such a condition."""


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "value", value)


def unchanged_since(key: str, mod_revision: Revision) -> Compare:
    """Condition that the key was last written at `mod_revision` (0: the key does not exist)."""
    return Compare(key, "mod_revision", int(mod_revision))


def none_written_after(prefix: str, revision: Revision) -> Compare:
    """Condition that no key under the prefix was written after `revision`. It does not notice
    deletions."""
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
    """`reads` holds the answers to the Get operations of the branch that ran, in order."""

    succeeded: bool
    revision: Revision
    reads: tuple[tuple[KeyValue, ...], ...]


def holds(compare: Compare, item: KeyValue | None) -> bool:
    """True if the condition holds for `item`, which its key has now (None: the key does not exist).
    Not for conditions on a prefix. Raises InvalidSpec for an unknown field."""
    match compare.field:
        case "value":
            return item is not None and item.value == compare.expected
        case "mod_revision" | "create_revision" | "version":
            seen = 0 if item is None else getattr(item, compare.field)
            return bool(seen == compare.expected)
    raise InvalidSpec(
        "a transaction compares an unknown field",
        seen=compare.field,
        expected="value, mod_revision, create_revision or version",
    )


class Keyspace(Protocol):
    """Keys that are read, watched and written in transactions.

    Keys are text, values bytes. Each call retries after failures of an endpoint and elections in
    etcd, for about `timeout_s` of the client (`transact`: up to twice that), then raises
    `Unavailable`. It raises etcd's refusals at once, such as `AccessDenied`, `Overloaded` and
    `LeaseExpired`. If the connection breaks after `transact` has sent a write, the outcome is
    unknown. `transact` does not send the write again, but raises `DeadlineExceeded` or
    `Unavailable` with `details["outcome"] == "unknown"`, and the caller reads back.
    """

    async def get(self, key: str) -> KeyValue | None: ...

    async def range(self, prefix: str) -> RangeResult: ...

    async def keys(self, prefix: str) -> tuple[str, ...]:
        """List all keys under a prefix, however many, without their values and in key order.

        They are read in pages, each as of the time of its own request.
        """
        ...

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult: ...

    def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        """Watch every change under `prefix` from revision `start` on, each exactly once, for ever.

        If etcd has compacted changes that are not delivered yet, a batch with `reset` takes their
        place. Survives restarts of etcd and the death of an endpoint. Ends when closed
        (`aclose`/cancellation), or by raising a refusal of etcd, or CorruptError if etcd lost
        history: its revision is below the last one delivered, or below `start - 1` before that.
        Raises InvalidSpec for a start below 1.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConfirmedRenewal:
    """A renewal that the store confirmed: the time at which it was sent (`time.monotonic`), and the
    TTL in seconds that the store answered."""

    sent_s: float
    ttl_s: float


class Renewal(Protocol):
    """Renewal of a lease in the background, which does not wait for the event loop."""

    @property
    def confirmed(self) -> ConfirmedRenewal | None:
        """The newest confirmed renewal; None before the first."""
        ...

    def report_alive(self) -> None:
        """Report that the event loop runs. If no report arrives for some time, renewals pause until
        the next report."""
        ...

    def end(self) -> None:
        """Stop renewing."""
        ...


class KeyValueStore(Keyspace, Protocol):
    """A linearizable store with leases and watches. `put` and `delete` are sent again if an
    answer was lost: another client's write of the same key in between is then overwritten or
    deleted."""

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision: ...

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete the key, or all keys under a prefix. Return how many keys the last attempt
        deleted: 0 if an earlier attempt deleted them and its answer was lost."""
        ...

    async def grant(self, ttl_s: float) -> LeaseId:
        """Create a lease. The TTL is rounded up to whole seconds and to etcd's minimum."""
        ...

    async def keep_alive(self, lease: LeaseId) -> float:
        """Renew once and return the TTL left in seconds; 0.0 when the lease is gone."""
        ...

    def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
        """Renew the lease in the background until `end`, or until the lease is gone, even while the
        event loop is busy."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease and delete its keys; a lease that is gone is no error."""
        ...

    async def close(self) -> None: ...
