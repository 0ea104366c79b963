"""A job's ledger in etcd: a base, written whole, and deltas after it.

The deltas are below the base's key, under the base's token, numbered from 0. A new base replaces
the last known one and its deltas in one transaction; a delta needs a free number. A coordinator's
first write is a base: coordinators that read an earlier base can then add no deltas. A base is
JSON, compressed with zlib if it is large; `core/samples/ledger_deltas.py` describes deltas.
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
"""Smaller bases stay readable with etcdctl."""
MAX_LEDGER_BYTES = 64 * 1024 * 1024


def ledger_in(job: str, base: bytes, held: Mapping[str, bytes]) -> SampleLedger:
    """Decode a base and its deltas. `held`: deltas by key, of any base. Raises JobQuarantined."""
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
        """Numbers by which deltas identify members; None: the next write is a base."""
        self._num_deltas = 0
        self._base_bytes = 0

    async def read(self) -> SampleLedger | None:
        """Read the newest ledger; None without one. Raises JobQuarantined, and what the store
        raises."""
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
        """True if this coordinator has written no deltas since its last base."""
        return self._num_deltas == 0

    async def write(self, ledger: SampleLedger, *, whole: bool = False) -> bool:
        """Make the ledger durable. Returns False, and writes nothing, if the stored record is not
        the one that this object has read or written last.

        Raises NotLeader, or another RetryError if nothing was written or the outcome is unknown.
        The next call then writes all changes, or returns False if this write took effect after all.
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
        """Return the revision of the write, read back if unknown; None if its conditions did not
        hold."""
        try:
            result = await self._store.transact(compares, operations)
        except RetryError as error:
            if not is_outcome_unknown(error):
                raise
            entry = await self._store.get(put.key)
            if entry is not None and entry.value == put.value:
                return entry.mod_revision
            if entry is None or entry.mod_revision == self._revision:
                raise  # no effect: the next write tries again
            return None
        return result.revision if result.succeeded else None


def _packed(data: dict[str, Any]) -> bytes:
    value = json.dumps(data, separators=(",", ":")).encode()
    return value if len(value) < COMPRESSED_FROM_BYTES else zlib.compress(value)


def _unpacked(value: bytes) -> bytes:
    return value if value[:1] in (b"{", b"") else inflate(value, MAX_LEDGER_BYTES)
