"""Encoding of a job's own record in etcd."""

import json
from dataclasses import asdict, replace

from shoal_proto.names import MAX_NAME_LENGTH, is_name
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress, JobResult, LifetimeFigures
from shoal_server.core.generations.roster import Generation, JobSpec, Step
from shoal_server.etcd.json_fields import Fields, UnreadableRecord

MAX_MEMBERS = 2**31 - 1


def state_to_json(record: StateRecord) -> bytes:
    """Encode the job's own record."""
    value: dict[str, object] = {
        "spec": asdict(record.spec),
        "last_generation": record.last_generation,
        "finished": record.finished,
        "reason": record.reason,
        "trained_in": record.progress.trained_in,
        "reached_step": record.progress.reached,
        "begun_unix_s": record.tally.begun_s,
        "num_breaks": record.tally.num_breaks,
        "idle_s": record.tally.idle_s,
        "idle_since_unix_s": record.tally.idle_since_s,
        "result": _result_to_json(record.tally.result),
        "cleared": record.tally.is_cleared,
        "lost": record.lost,
        "stopping": record.stopping,
        "failed": record.failed,
        "ended_unix_s": record.ended_s,
        "done": record.done,
        "completing": record.completing,
    }
    return json.dumps({**record.more, **value}).encode()


def state_from_json(job: str, data: bytes) -> StateRecord:
    """Decode the job's own record. Raises UnreadableRecord."""
    fields = Fields.parsed(data)
    spec = spec_from(fields.object("spec"))
    if spec.job != job:
        raise UnreadableRecord(f"spec.job is {spec.job[:MAX_NAME_LENGTH]!r}; expected {job!r}")
    if problem := spec.problem():
        raise UnreadableRecord(problem)
    record = StateRecord(
        spec=spec,
        last_generation=Generation(fields.count("last_generation")),
        finished=fields.flag("finished"),
        reason=fields.text("reason"),
        progress=JobProgress(
            trained_in=Generation(fields.count("trained_in")),
            reached=Step(fields.count("reached_step")),
        ),
        lost=fields.text("lost") if fields.has("lost") else None,
        stopping=fields.text("stopping"),
        failed=fields.flag("failed"),
        tally=_tally(fields),
        ended_s=fields.seconds("ended_unix_s"),
        done=fields.texts("done"),
        completing=fields.flag("completing"),
    )
    return replace(record, more=fields.unread_fields())


def _tally(fields: Fields) -> LifetimeFigures:
    return LifetimeFigures(
        begun_s=fields.seconds("begun_unix_s"),
        num_breaks=fields.count("num_breaks"),
        idle_s=fields.seconds("idle_s"),
        idle_since_s=fields.seconds("idle_since_unix_s")
        if fields.has("idle_since_unix_s")
        else None,
        result=result_from(fields.object("result")) if fields.has("result") else None,
        is_cleared=fields.flag("cleared"),
    )


def result_from(fields: Fields) -> JobResult:
    """Decode a job's result. Raises UnreadableRecord."""
    try:
        loss = float(fields.text("loss")) if fields.has("loss") else None
    except ValueError as error:
        raise UnreadableRecord(f"result.loss is not a number ({error})") from None
    return JobResult(
        step=Step(fields.count("step")),
        loss=loss,
        num_samples=fields.count("num_samples") if fields.has("num_samples") else None,
    )


def _result_to_json(result: JobResult | None) -> dict[str, object] | None:
    """Encode the loss as text: JSON has no NaN and infinity."""
    if result is None:
        return None
    loss = None if result.loss is None else repr(result.loss)
    return {"step": result.step, "loss": loss, "num_samples": result.num_samples}


def spec_from(bounds: Fields) -> JobSpec:
    """Decode a job's bounds. Raises UnreadableRecord."""
    return JobSpec(
        job=bounds.text("job"),
        min_members=bounds.count("min_members", most=MAX_MEMBERS),
        max_members=bounds.count("max_members", most=MAX_MEMBERS),
        desired_members=bounds.count("desired_members", most=MAX_MEMBERS),
        last_call_s=bounds.seconds("last_call_s"),
        secret_digest=bounds.text("secret_digest"),
    )


def secret_digest_from(fields: Fields, otherwise: str = "") -> str:
    """Digest of the job's secret; empty without a secret, and `otherwise` without readable bounds.
    Raises UnreadableRecord for an unreadable digest."""
    try:
        bounds = fields.object("spec")
    except UnreadableRecord:
        return otherwise
    return bounds.text("secret_digest", "")


def name_in_key(prefix: str, key: str, *, suffix: str = "") -> str | None:
    """Name of the job, member or server in a key; None without a valid name."""
    name = key.removeprefix(prefix)
    if not name.endswith(suffix):
        return None
    name = name.removesuffix(suffix)
    return name if is_name(name) else None
