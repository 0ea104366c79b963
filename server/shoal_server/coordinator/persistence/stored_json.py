"""What a coordinator reads from etcd, taken apart without trust.

A person, another version or a broken disk may have written it. Each reader raises `Unreadable` for
whatever it cannot use, and ignores fields that it does not know: a newer version has written them.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from google.protobuf.json_format import ParseError

from shoal_proto.errors import JobSetAside
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import Generation, JobSpec, Step
from shoal_server.core.names import MAX_NAME_LENGTH, is_name

MAX_COUNT = 2**53 - 1
"""JSON numbers beyond it are not exact everywhere, and Shoal counts nothing that high."""
MAX_MEMBERS = 2**31 - 1


class Unreadable(ValueError):
    """The bytes are not what is to lie at their key; the text says what was seen."""


@contextmanager
def taken_apart() -> Iterator[None]:
    """Turns whatever the reading of foreign bytes may raise into `Unreadable`."""
    try:
        yield
    except Unreadable:
        raise
    except (
        ValueError,  # UnicodeDecodeError and JSONDecodeError are some
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        ParseError,
    ) as error:
        raise Unreadable(f"{type(error).__name__}: {str(error)[:200]}") from error


def set_aside(job: str, key: str, error: Exception) -> JobSetAside:
    """What is told of a job that something in etcd keeps from going on."""
    return JobSetAside(
        f"job {job} is set aside: what lies at {key} in etcd cannot be read",
        seen=str(error)[:500],
        expected="what a coordinator of this version writes there",
        fix="Mend or delete the key (etcdctl), then restart the coordinator that leads.",
        details={"job": job, "key": key},
    )


class Fields:
    """The fields of a JSON object, each checked as it is read."""

    def __init__(self, value: Mapping[str, object]) -> None:
        self._value = value

    @classmethod
    def parsed(cls, data: bytes) -> "Fields":
        """Those of the object that the bytes hold. Raises Unreadable."""
        with taken_apart():
            value = json.loads(data)
        if not isinstance(value, dict):
            raise Unreadable(f"JSON {type(value).__name__}; expected an object")
        return cls(value)

    def text(self, name: str, default: str | None = None) -> str:
        found = self._value.get(name, default)
        if not isinstance(found, str):
            raise Unreadable(f"{name} is {_shown(found)}; expected a string")
        return found

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def flag(self, name: str) -> bool:
        found = self._value.get(name)
        if not isinstance(found, bool):
            raise Unreadable(f"{name} is {_shown(found)}; expected true or false")
        return found

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        found = self._value.get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
            raise Unreadable(f"{name} is {_shown(found)}; expected an integer from 0 to {most}")
        return found

    def seconds(self, name: str) -> float:
        found = self._value.get(name, 0.0)
        if not isinstance(found, int | float) or isinstance(found, bool) or abs(found) > MAX_COUNT:
            raise Unreadable(f"{name} is {_shown(found)}; expected a number of seconds")
        if not math.isfinite(found):
            raise Unreadable(f"{name} is {found}; expected a finite number of seconds")
        return float(found)

    def object(self, name: str) -> "Fields":
        found = self._value.get(name)
        if not isinstance(found, dict):
            raise Unreadable(f"{name} is {_shown(found)}; expected an object")
        return Fields(found)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def state_to_json(record: StateRecord) -> bytes:
    """A job's own key."""
    spec = record.spec
    value: dict[str, object] = {
        "spec": {
            "job": spec.job,
            "min_members": spec.min_members,
            "max_members": spec.max_members,
            "desired_members": spec.desired_members,
            "last_call_s": spec.last_call_s,
        },
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


__all__ = [
    "Fields",
    "Unreadable",
    "named_under",
    "set_aside",
    "state_from_json",
    "state_to_json",
    "taken_apart",
]
