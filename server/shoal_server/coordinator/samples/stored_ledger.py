"""One job's ledger in etcd: a base, written whole, and deltas after it.

The base is stored at the job's key of samples and contains a token. Its deltas are stored below
that key, under the token, numbered from 0. A new base replaces the old one and all its deltas in
one transaction, so that a reader always finds the ledger as of one write. Deltas of another base,
which a restored backup of etcd may leave, are ignored.

A base replaces only the base that this coordinator read or wrote last, and a delta is written only
if its number is free. The first write of a coordinator that has opened a ledger is a base; after
it, no coordinator that read an earlier base can add deltas.
"""

import json
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal_proto.deflated import inflate
from shoal_proto.errors import RetryError
from shoal_server.coordinator.persistence.quarantine import unreadable
from shoal_server.core.samples import ledger_deltas
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.samples.ledger_deltas import MemberNumbers
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    Get,
    Operation,
    Put,
    Revision,
    absent,
    unchanged_since,
)
from shoal_server.etcd.json_fields import UnreadableRecord, as_unreadable
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.repeat import is_outcome_unknown

MAX_DELTAS = 128
COMPRESSED_FROM_BYTES = 256 * 1024
"""Size from which a base is compressed: a ledger of a few thousand members. Smaller ones stay
readable with etcdctl."""
MAX_LEDGER_BYTES = 64 * 1024 * 1024


def ledger_in(job: str, base: bytes, held: Mapping[str, bytes]) -> SampleLedger:
    """The ledger of a base and its deltas. `held`: deltas by key, possibly also of other bases.
    Raises JobQuarantined if base or deltas cannot be read."""
    key = where = keys.sample_ledger(job)
    try:
        with as_unreadable():
            data = json.loads(_unpacked(base))
            deltas: list[bytes] = []
            token = data.pop("deltas", "")
            while (at := keys.sample_delta(job, token, len(deltas))) in held:
                deltas.append(held[at])
            where = f"{key} or {keys.sample_deltas(job)}" if deltas else key
            return SampleLedger.from_json(ledger_deltas.folded(data, deltas) if deltas else data)
    except UnreadableRecord as error:
        raise unreadable(job, where, error) from error


class StoredLedger:
    """Reads and writes a job's ledger."""

    def __init__(self, store: LeaderStore, job: str) -> None:
        self._store = store
        self._job = job
        self._revision = Revision(0)
        self._token = ""
        self._numbers: MemberNumbers | None = None
        """Numbers that the base gives to members; None if the next write is a base."""
        self._num_deltas = 0
        self._base_bytes = 0

    async def read(self) -> SampleLedger | None:
        """The ledger as of the newest write; None if there is none. Raises JobQuarantined, and what
        the store raises."""
        key, prefix = keys.sample_ledger(self._job), keys.sample_deltas(self._job)
        result = await self._store.transact([], [Get(key), Get(prefix, prefix=True)])
        bases, delta_items = result.reads
        if not bases:
            return None
        held = {each.key: each.value for each in delta_items}
        ledger = ledger_in(self._job, bases[0].value, held)
        self._revision = bases[0].mod_revision
        return ledger

    @property
    def has_no_deltas(self) -> bool:
        """True if this coordinator has written no deltas since its last base. Deltas of an earlier
        coordinator, which `read` found, are not counted."""
        return self._num_deltas == 0

    async def write(self, ledger: SampleLedger, *, whole: bool = False) -> bool:
        """Make the current ledger durable. False if the record is not the one that this coordinator
        read or wrote last.

        Raises NotLeader, or another RetryError if nothing was written or the result could not be
        read back. The next call then writes all changes, or returns False if this write took effect
        after all.
        """
        touched = ledger.pop_touched()
        try:
            if not whole and self._numbers is not None and self._num_deltas < MAX_DELTAS:
                part = ledger.to_json(touched)
                delta = ledger_deltas.encoded(part, touched, self._numbers)
                if 2 * len(delta) < self._base_bytes:
                    return await self._append(delta, part, self._numbers)
            return await self._write_base(ledger)
        except BaseException:
            ledger.touch(touched)
            raise

    async def _write_base(self, ledger: SampleLedger) -> bool:
        key, token = keys.sample_ledger(self._job), secrets.token_hex(4)
        data = ledger.to_json()
        value = _packed({**data, "deltas": token})
        result = await self._transact(
            [unchanged_since(key, self._revision)],
            [Delete(keys.sample_deltas(self._job), prefix=True), Put(key, value)],
            Put(key, value),
        )
        if result is None:
            return False
        self._revision, self._token = result, token
        self._numbers, self._num_deltas = MemberNumbers(data), 0
        self._base_bytes = len(value)
        return True

    async def _append(self, delta: bytes, part: dict[str, Any], numbers: MemberNumbers) -> bool:
        at = keys.sample_delta(self._job, self._token, self._num_deltas)
        put = Put(at, delta)
        base_is_ours = unchanged_since(keys.sample_ledger(self._job), self._revision)
        if await self._transact([base_is_ours, absent(at)], [put], put) is None:
            return False
        numbers.note(part)
        self._num_deltas += 1
        return True

    async def _transact(
        self, compares: Sequence[Compare], operations: Sequence[Operation], put: Put
    ) -> Revision | None:
        """The revision of the write, which is read back if the outcome is unknown. None if its
        conditions did not hold."""
        try:
            result = await self._store.transact(compares, operations)
        except RetryError as error:
            if not is_outcome_unknown(error):
                raise
            entry = await self._store.get(put.key)
            if entry is not None and entry.value == put.value:
                return entry.mod_revision
            if entry is None or entry.mod_revision == self._revision:
                raise  # it did not take effect: the next write tries again
            return None
        return result.revision if result.succeeded else None


def _packed(data: dict[str, Any]) -> bytes:
    value = json.dumps(data, separators=(",", ":")).encode()
    return value if len(value) < COMPRESSED_FROM_BYTES else zlib.compress(value)


def _unpacked(value: bytes) -> bytes:
    return value if value[:1] in (b"{", b"") else inflate(value, MAX_LEDGER_BYTES)
