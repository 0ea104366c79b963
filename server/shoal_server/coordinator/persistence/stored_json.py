"""A job's own key in etcd, and what is told of a job of which something cannot be read."""

import json
from dataclasses import asdict

from shoal_proto.errors import JobSetAside
from shoal_proto.names import MAX_NAME_LENGTH, is_name
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import Generation, JobSpec, Step
from shoal_server.etcd.json_fields import Fields, Unreadable

MAX_MEMBERS = 2**31 - 1


def set_aside(job: str, key: str, error: Exception) -> JobSetAside:
    """What is told of a job that something in etcd keeps from going on."""
    return JobSetAside(
        f"job {job} is set aside: what lies at {key} in etcd cannot be read",
        seen=str(error)[:500],
        expected="what a coordinator of this version writes there",
        fix="Mend or delete the key (etcdctl), then restart the coordinator that leads.",
        details={"job": job, "key": key},
    )


def state_to_json(record: StateRecord) -> bytes:
    """A job's own key."""
    value: dict[str, object] = {
        "spec": asdict(record.spec),
        "last_generation": record.last_generation,
        "finished": record.finished,
        "reason": record.reason,
    }
    if record.progress is not None:
        value["trained_in"] = record.progress.trained_in
        value["reached_step"] = record.progress.reached
    if record.lost is not None:
        value["lost"] = record.lost
    return json.dumps(value).encode()


def state_from_json(job: str, data: bytes) -> StateRecord:
    """The record of that job. Raises Unreadable."""
    fields = Fields.parsed(data)
    bounds = fields.object("spec")
    spec = JobSpec(
        job=bounds.text("job"),
        min_members=bounds.count("min_members", most=MAX_MEMBERS),
        max_members=bounds.count("max_members", most=MAX_MEMBERS),
        desired_members=bounds.count("desired_members", most=MAX_MEMBERS),
        last_call_s=bounds.seconds("last_call_s"),
    )
    if spec.job != job:
        raise Unreadable(f"spec.job is {spec.job[:MAX_NAME_LENGTH]!r}; expected {job!r}")
    if problem := spec.problem():
        raise Unreadable(problem)
    return StateRecord(
        spec=spec,
        last_generation=Generation(fields.count("last_generation")),
        finished=fields.flag("finished"),
        reason=fields.text("reason", ""),
        progress=Progress(
            trained_in=Generation(fields.count("trained_in")),
            reached=Step(fields.count("reached_step", 0)),
        )
        if fields.has("trained_in")
        else None,
        lost=fields.text("lost") if fields.has("lost") else None,
    )


def named_under(prefix: str, key: str, *, suffix: str = "") -> str | None:
    """The job, member or server that a key under the prefix is of; None if it is no such key."""
    name = key.removeprefix(prefix)
    if not name.endswith(suffix):
        return None
    name = name.removesuffix(suffix)
    return name if is_name(name) else None
