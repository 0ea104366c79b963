"""What the coordinator writes to etcd, each write fenced by its own leadership."""

import json
from collections.abc import Callable, Sequence

from google.protobuf.json_format import ParseError

from shoal_proto.errors import NotLeader, RetryError, Unavailable
from shoal_server.coordinator import codec
from shoal_server.core.job import Job
from shoal_server.core.member import Member
from shoal_server.core.restore import Saved
from shoal_server.core.roster import Generation, JobSpec, Record, Verdict
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    KeyValueStore,
    Operation,
    Put,
    TransactionResult,
)


class DurableJobs:
    """Reads and writes jobs. `leadership` gives what must hold for this coordinator to lead."""

    def __init__(self, store: KeyValueStore, leadership: Callable[[], Sequence[Compare]]) -> None:
        self._store = store
        self._leadership = leadership

    async def apply(self, operations: Sequence[Operation]) -> None:
        """Make the operations durable in one transaction.

        All of them are idempotent, so a write whose outcome is unknown is simply written again.
        Raises NotLeader once another coordinator leads, Unavailable while etcd is away.
        """
        while True:
            try:
                result = await self._store.transact(self._leadership(), operations)
            except RetryError as error:
                if error.details.get("outcome") != "unknown":
                    raise
                continue
            self._require(result)
            return

    @staticmethod
    def _require(result: TransactionResult) -> None:
        if not result.succeeded:
            raise NotLeader(
                "this coordinator no longer leads",
                seen="another leader's key in etcd",
                expected="its own",
                fix="Ask another coordinator.",
            )

    async def names(self) -> list[str]:
        """The names of all jobs there have been."""
        snapshot = await self._store.range(keys.JOBS)
        found = (item.key.removeprefix(keys.JOBS).partition("/") for item in snapshot.items)
        return [job for job, _, rest in found if rest == "state"]

    async def load(self, job: str, now_s: float) -> tuple[JobSpec, Saved, list[Record]] | None:
        """A job's bounds, state and decided records; None if there never was one of that name."""
        state = await self._store.get(keys.job_state(job))
        if state is None:
            return None
        try:
            value = json.loads(state.value)
            snapshot = await self._store.range(keys.generations(job))
            records = [
                codec.record_from_pb(codec.record_from_json(item.value)) for item in snapshot.items
            ]
        except (ValueError, KeyError, ParseError) as error:
            raise Unavailable(
                f"what etcd holds of job {job} cannot be read", seen=repr(error)
            ) from error
        committed = [r for r in records if r.verdict is Verdict.COMMITTED]
        saved = Saved(
            last_generation=Generation(
                max([value["last_generation"], *(r.roster.generation for r in records)])
            ),
            record=committed[-1] if committed else None,
            before=committed[-2] if len(committed) > 1 else None,
            members=tuple(await self._members(job, now_s)),
            finished=value["finished"],
            reason=value["reason"],
        )
        return JobSpec(**value["spec"]), saved, records

    async def _members(self, job: str, now_s: float) -> list[Member]:
        snapshot = await self._store.range(keys.members(job))
        members = []
        for item in snapshot.items:
            incarnation, info = codec.member_from_json(item.value)
            members.append(
                Member(
                    member_id=item.key.removeprefix(keys.members(job)),
                    incarnation=incarnation,
                    info=info,
                    attended_s=now_s,
                    waiting_since_s=now_s,
                )
            )
        return members


def state_put(job: Job, *, finished: bool) -> Put:
    """The job's own key, as it is after the effects so far."""
    spec = job.spec
    value = {
        "spec": {
            "job": spec.job,
            "min_members": spec.min_members,
            "max_members": spec.max_members,
            "desired_members": spec.desired_members,
            "last_call_s": spec.last_call_s,
        },
        "last_generation": job.last_generation,
        "finished": finished,
        "reason": job.reason,
    }
    return Put(keys.job_state(spec.job), json.dumps(value).encode())


def record_put(record: Record) -> Put:
    message = codec.record_to_pb(record)
    key = keys.generation(record.job, record.roster.generation)
    return Put(key, codec.record_to_json(message))


def member_delete(job: str, member_id: str) -> Delete:
    return Delete(keys.member(job, member_id))
