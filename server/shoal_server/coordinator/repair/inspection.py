"""Search for unreadable records of a job in etcd, and the remedy for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal_proto.errors import ShoalError
from shoal_server.coordinator.persistence import codec, earlier_runs
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.coordinator.persistence.stored_json import state_from_json
from shoal_server.coordinator.plug_in.interface import CheckRecord
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace, KeyValue
from shoal_server.etcd.json_fields import LaterFormat, UnreadableRecord

EXCERPT_BYTES = 120


class RecordKind(Enum):
    """Kinds of records of a job in etcd."""

    STATE = "the job's own record"
    GENERATION = "the record of a generation"
    MEMBER = "a member"
    SAMPLES = "the sample ledger"
    EARLIER_RUNS = "the record of earlier runs"
    SHARDS = "the shard map"
    ASSIGNMENT = "a shard assignment"


REMEDIES: Mapping[RecordKind, str] = {
    RecordKind.STATE: "It is rewritten from its readable fields and from the records of"
    " generations: the job continues. A secret that cannot be read becomes that of --job-secret;"
    " without it, the job has none.",
    RecordKind.GENERATION: "It is moved aside. If it is the newest, members stop, report their"
    " steps, and form the next generation from the state at the highest step.",
    RecordKind.MEMBER: "It is moved aside: the member's process is fenced, and has to join again.",
    RecordKind.SAMPLES: "It is moved aside, and samples are leased from the first one on: all are"
    " trained on again.",
    RecordKind.EARLIER_RUNS: "It is moved aside: processes of earlier runs of the job can no longer"
    " be recognised. Make sure that none is left. The next run numbers its generations above those"
    " that have published weights.",
}
"""Effect of repairing each kind; other kinds cannot be repaired."""
NO_REMEDY = (
    "None: the record says where trained parameters are. `shoal restore` restores them from a"
    " snapshot; after `shoal rm` the job starts over without them."
)
OF_A_LATER_RELEASE = (
    "None is needed: a later release of shoal wrote the record. A coordinator of that release"
    " continues the job."
)


@dataclass(frozen=True, kw_only=True)
class FaultyRecord:
    """An unreadable record."""

    kind: RecordKind
    item: KeyValue
    error: str
    is_later: bool = False
    """True if a later release wrote the record."""

    @property
    def is_repairable(self) -> bool:
        return self.kind in REMEDIES and not self.is_later

    @property
    def remedy(self) -> str:
        return OF_A_LATER_RELEASE if self.is_later else REMEDIES.get(self.kind, NO_REMEDY)

    @property
    def excerpt(self) -> str:
        """Printable start of the value."""
        start = self.item.value[:EXCERPT_BYTES]
        return repr(start)[2:-1] + (" ..." if len(self.item.value) > EXCERPT_BYTES else "")


def kind_of(job: str, key: str) -> RecordKind | None:
    """Kind of record at a key of the job; None for a key that is not checked by itself."""
    single = {
        keys.job_state(job): RecordKind.STATE,
        keys.sample_ledger(job): RecordKind.SAMPLES,
        keys.reset(job): RecordKind.EARLIER_RUNS,
        keys.shard_map(job): RecordKind.SHARDS,
    }
    if key in single:
        return single[key]
    if key.startswith(keys.assignments(job)):
        return RecordKind.ASSIGNMENT
    if key.startswith(keys.members(job)):
        return RecordKind.MEMBER if "/" not in key.removeprefix(keys.members(job)) else None
    return None if keys.generation_number(job, key) is None else RecordKind.GENERATION


async def records_of(store: Keyspace, job: str) -> list[KeyValue]:
    """Read all keys from which a coordinator continues a job. Raises what the store raises."""
    items: list[KeyValue] = []
    for prefix in (keys.job_prefix(job), keys.members(job), keys.assignments(job)):
        items += (await store.range(prefix)).items
    runs = await store.get(keys.reset(job))
    return [*items, runs] if runs is not None else items


def unreadable_records(
    job: str, items: Sequence[KeyValue], check_other: CheckRecord
) -> list[FaultyRecord]:
    """Return all unreadable records of a job. `check_other` checks the plug-in's records."""
    bad = []
    for item in items:
        kind = kind_of(job, item.key)
        if kind is None:
            continue
        try:
            if kind in _READ:
                _READ[kind](job, item)
            else:
                check_other(job, item, items)
        except (UnreadableRecord, ShoalError) as error:
            later = isinstance(error, LaterFormat) or isinstance(error.__cause__, LaterFormat)
            bad.append(FaultyRecord(kind=kind, item=item, error=str(error)[:500], is_later=later))
    return bad


def _read_generation(job: str, item: KeyValue) -> None:
    number = keys.generation_number(job, item.key)
    assert number is not None, "by its kind"
    stored_record(job, number, item.value)


_READ: Mapping[RecordKind, Callable[[str, KeyValue], object]] = {
    RecordKind.STATE: lambda job, item: state_from_json(job, item.value),
    RecordKind.GENERATION: _read_generation,
    RecordKind.MEMBER: lambda job, item: codec.member_from_json(item.value),
    RecordKind.EARLIER_RUNS: lambda job, item: earlier_runs.from_json(job, item.value),
}
