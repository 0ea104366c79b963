"""The Repairs service: shows why a job is quarantined, and continues it without the broken records.

A broken record that is deleted or rewritten is copied to a key under a separate prefix.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from shoal_proto.errors import InvalidSpec, UnknownJob
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.secrets import digest_of
from shoal_proto.v1 import repair_pb2 as pb
from shoal_proto.v1.repair_pb2_grpc import RepairsServicer
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.persistence.earlier_runs import EarlierRuns
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.plug_in.interface import CheckRecord
from shoal_server.coordinator.repair import inspection, state_repair
from shoal_server.coordinator.repair.inspection import FaultyRecord, RecordKind
from shoal_server.core.generations.roster import GenerationRecord
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, KeyValue, Operation, Put, unchanged_since
from shoal_server.etcd.json_fields import UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.rpc import Context

log = structlog.get_logger(__name__)

MAX_SHOWN = 100
COPIES_AT_ONCE = 32
EXPECTED = "a record as a coordinator of this release writes it"

TakeUp = Callable[[str], Awaitable[str]]
"""Continues a job from its keys in etcd, and returns its phase."""


class RepairService(RepairsServicer):
    """Repairs jobs, on the coordinator's event loop."""

    def __init__(
        self,
        store: LeaderStore,
        registry: Registry,
        check_other: CheckRecord,
        take_up: TakeUp,
        *,
        published_in: Callable[[str], int],
    ) -> None:
        """`published_in` returns the newest generation that has published a series of a job."""
        self._store = store
        self._registry = registry
        self._check_other = check_other
        self._take_up = take_up
        self._published_in = published_in

    async def Repair(self, request: pb.RepairRequest, context: Context) -> pb.RepairReply:
        self._registry.require_leading()
        job = request.job
        if not is_name(job):
            raise InvalidSpec("job is not a valid name", seen=repr(job), expected=NAME_RULE)
        items = await inspection.records_of(self._store, job)
        known = self._registry.actor_if_known(job)
        quarantined = self._registry.quarantined.get(job)
        if not items and known is None and quarantined is None:
            raise UnknownJob(f"there is no job {job!r}", fix="`shoal status` lists the jobs.")
        broken = inspection.unreadable_records(job, items, self._check_other)
        reply = pb.RepairReply(goes_on=quarantined is None)
        if quarantined is not None:
            why, since_s = quarantined
            reply.quarantined, reply.reason, reply.since_unix_s = True, str(why), since_s
        moved: dict[str, str] = {}
        if request.apply and quarantined is not None:
            moved = await self._mend(request, items, [b for b in broken if b.is_repairable])
            reply.phase, reply.goes_on = await self._take_up(job), True
            log.warning("job_repaired", job=job, moved=list(moved.values()), phase=reply.phase)
        elif known is not None:
            reply.phase = known.job.phase.value
        reply.records.extend(_broken_record(each, moved) for each in broken[:MAX_SHOWN])
        return reply

    async def _mend(
        self, request: pb.RepairRequest, items: Sequence[KeyValue], broken: Iterable[FaultyRecord]
    ) -> dict[str, str]:
        """Copy the broken records aside, and delete or rewrite them. Returns the key of each copy,
        by record.

        A record that was changed meanwhile stays. Raises InvalidSpec if the job's bounds are
        unknown, and what the store raises; some records may be moved by then.
        """
        job, stamp = request.job, time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        moved = {}
        for each in broken:
            key = each.item.key
            target = keys.quarantined(job, stamp, key)
            writes: list[Operation] = [Put(target, each.item.value)]
            earlier: EarlierRuns | None = None
            if each.kind is RecordKind.SAMPLES:
                writes.append(await self._deltas_moved(job, stamp, items))
            if each.kind is RecordKind.EARLIER_RUNS:
                earlier = self._new_earlier_runs(job, items)
            if each.kind is RecordKind.STATE:
                writes.append(self._new_state(request, items, each.item))
            else:
                writes.append(Delete(key) if earlier is None else Put(key, earlier.to_json()))
            result = await self._store.transact(
                [unchanged_since(key, each.item.mod_revision)], writes
            )
            if result.succeeded:
                moved[key] = target
                if earlier is not None:
                    self._registry.earlier_runs[job] = earlier
        return moved

    def _new_earlier_runs(self, job: str, items: Sequence[KeyValue]) -> EarlierRuns | None:
        """Record from which the next run numbers its generations above those of the kept series,
        which refuse lower ones. None if a run has begun: its generations would count as earlier."""
        if any(item.key == keys.job_state(job) for item in items):
            return None
        return EarlierRuns(job=job).with_run(self._published_in(job), ())

    async def _deltas_moved(self, job: str, stamp: str, items: Sequence[KeyValue]) -> Delete:
        prefix = keys.sample_deltas(job)
        copies = [
            Put(keys.quarantined(job, stamp, item.key), item.value)
            for item in items
            if item.key.startswith(prefix)
        ]
        for start in range(0, len(copies), COPIES_AT_ONCE):
            await self._store.transact([], copies[start : start + COPIES_AT_ONCE])
        return Delete(prefix, prefix=True)

    def _new_state(
        self, request: pb.RepairRequest, items: Sequence[KeyValue], item: KeyValue
    ) -> Put:
        job = request.job
        numbers, records = _generations(job, items)
        try:
            bounds = state_repair.bounds_of(
                job, request.min_members, request.max_members, request.desired_members
            )
            if bounds is None and not any(i.key.startswith(keys.members(job)) for i in items):
                # The first member that joins sets the bounds.
                bounds = state_repair.bounds_of(job, 1, 0, 0)
            state = state_repair.repaired_state(
                job,
                item.value,
                generations=numbers,
                records=records,
                published_in=self._published_in(job),
                bounds=bounds,
                secret_digest=digest_of(request.job_secret),
            )
        except UnreadableRecord as error:
            raise InvalidSpec(
                f"the bounds of job {job} are not known",
                seen=str(error),
                expected="min_members <= desired_members <= max_members",
                fix="Give --min, --max and --desired, as its members have them.",
            ) from error
        return Put(item.key, state_to_json(state))


def _generations(job: str, items: Sequence[KeyValue]) -> tuple[list[int], list[GenerationRecord]]:
    numbers, records = [], []
    for item in items:
        number = keys.generation_number(job, item.key)
        if number is None:
            continue
        numbers.append(number)
        try:
            records.append(stored_record(job, number, item.value))
        except UnreadableRecord as error:
            log.info("record_unreadable", key=item.key, reason=str(error))
    return numbers, records


def _broken_record(broken: FaultyRecord, moved: dict[str, str]) -> pb.BrokenRecord:
    return pb.BrokenRecord(
        key=broken.item.key,
        kind=broken.kind.value,
        seen=broken.error,
        expected=EXPECTED,
        excerpt=broken.excerpt,
        num_bytes=len(broken.item.value),
        remedy=broken.remedy,
        mendable=broken.is_repairable,
        moved_to=moved.get(broken.item.key, ""),
    )
