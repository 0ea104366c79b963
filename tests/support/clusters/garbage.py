"""Values that must never be in etcd, by the record that they replace."""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shoal_server.coordinator.persistence.stored_generations import record_to_json
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.etcd import keys

SHAPELESS: Mapping[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "a number": b"7",
    "cut short": b'{"spec": {"job": "d',
    "no text": b"\xff\xfe\x00garbage\x80",
    "an empty object": b"{}",
    "nested": b"[" * 100_000,
    "wrong types": json.dumps(
        {"spec": [], "last_generation": "9", "finished": "no", "incarnation": 7, "roster": "x"}
    ).encode(),
    "infinite": b'{"last_generation": 1e999, "roster": {"step": NaN}}',
}


def good_state(job: str) -> dict[str, object]:
    """Return the state of an unfinished job, as JSON types."""
    spec = JobSpec(job=job, max_members=8)
    record = StateRecord(spec=spec, last_generation=Generation(1), finished=False, reason="")
    state: dict[str, object] = json.loads(state_to_json(record))
    return state


def good_member() -> dict[str, object]:
    """Return the value of a member's key, as JSON types."""
    texts = dict.fromkeys(("host", "address", "device", "torch_version", "shoal_version"), "x")
    return {"incarnation": "0001", "pid": 1, **texts}


def good_record(job: str) -> dict[str, object]:
    """Return the record of generation 1, as JSON types."""
    roster = GenerationRoster(
        generation=Generation(1),
        entries=(RosterEntry(member_id="w0", incarnation="0001", rank=0),),
        source_member_id="w0",
        step=Step(0),
        planned=False,
        synchronous=True,
        fields={},
    )
    decided = GenerationRecord(
        job=job,
        roster=roster,
        verdict=Verdict.COMMITTED,
        reason="r",
        digest="d",
        decided_s=1.0,
    )
    record: dict[str, object] = json.loads(record_to_json(decided))
    return record


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


STATES: Mapping[str, object] = {
    "last_generation": 10**400,
    "finished": 1,
    "reason": 7,
    "spec": {"job": "another", "min_members": 1, "max_members": 2, "desired_members": 1},
}
MEMBERS: Mapping[str, object] = {"incarnation": "", "pid": 10**30, "host": None, "probe_port": -1}
RECORDS: Mapping[str, object] = {
    "job": "another",
    "verdict": "VERDICT_UNSPECIFIED",
    "roster": {"generation": "2"},
    "packed_roster": base64.b64encode(zlib.compress(b"\xff\xfe")).decode(),
    "decided_unix_s": "Infinity",
    "digest": 7,
}
LEDGERS: Mapping[str, object] = {
    "dataset_size": "8",
    "num_epochs": 1.5,
    "closed": [["a", "b"]],
    "open": [{"epoch": 0, "free": [[0, 99]], "returned": 0}],
    "members": {"w0": []},
    "num_closed": 10**30,
}


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """A bad key of a job, with the other keys that the job needs."""

    job: str
    key: str
    entries: Mapping[str, bytes]
    what: str
    is_fatal: bool = True
    """True if the job cannot continue."""


def all_garbage() -> list[Garbage]:
    """Return all kinds of garbage, each in a separate job."""
    found: list[Garbage] = []

    def add(what: str, template: str, value: bytes, *, is_fatal: bool = True) -> None:
        job = f"bad-{len(found)}"
        key = template.format(job=job)
        entries = {keys.job_state(job): as_json(good_state(job)), key: value}
        found.append(Garbage(job=job, key=key, entries=entries, what=what, is_fatal=is_fatal))

    ledger = {"format": 1, "dataset_size": 8, "num_epochs": 1, "num_closed": 0}
    ledger |= {"closed_returned": 0, "ignored": 0}
    books: dict[str, object] = {**ledger, "closed": [], "open": [], "members": {}}
    number = f"{1:012d}"
    for name, value in SHAPELESS.items():
        add(f"state: {name}", keys.JOBS + "{job}/state", value)
        add(f"generation: {name}", keys.JOBS + "{job}/generations/" + number, value)
        add(f"member: {name}", keys.MEMBERS + "{job}/w0", value)
        add(f"samples: {name}", keys.JOBS + "{job}/samples", value)
        add(f"reset: {name}", keys.RESETS + "{job}", value)
        for family in ("shards", "lineage", "restored_from", "history"):
            add(f"{family}: {name}", keys.JOBS + "{job}/" + family, value, is_fatal=False)
        packed = zlib.compress(value)
        add(f"history: packed {name}", keys.JOBS + "{job}/history", packed, is_fatal=False)
        add(f"ended server: {name}", keys.ENDED_SERVERS + "{job}/x", value, is_fatal=False)
        add(f"last process: {name}", keys.LAST_PROCESSES + "{job}", value, is_fatal=False)
        for record in ("head", "run/00000000"):
            key = keys.ASSIGNMENTS + "{job}/" + record
            add(f"assignments {record}: {name}", key, value, is_fatal=False)
        add(f"server: {name}", keys.SERVERS + "{job}", value, is_fatal=False)
    for field, wrong in STATES.items():
        broken = good_state(f"bad-{len(found)}") | {field: wrong}
        add(f"state: bad {field}", keys.JOBS + "{job}/state", as_json(broken))
    for field, wrong in MEMBERS.items():
        value = as_json(good_member() | {field: wrong})
        add(f"member: bad {field}", keys.MEMBERS + "{job}/w0", value)
    for field, wrong in RECORDS.items():
        broken = good_record(f"bad-{len(found)}") | {field: wrong}
        add(f"generation: bad {field}", keys.JOBS + "{job}/generations/" + number, as_json(broken))
    for field, wrong in LEDGERS.items():
        value = as_json(books | {field: wrong})
        add(f"samples: bad {field}", keys.JOBS + "{job}/samples", value)
    for name, template in {
        "a member with a slash": keys.MEMBERS + "{job}/a/b",
        "a member without a name": keys.MEMBERS + "{job}/",
        "a job with a space": keys.JOBS + "no {job}/state",
        "a job without a name": keys.JOBS + "/state",
        "a generation that is not a number": keys.JOBS + "{job}/generations/abc",
        "a generation whose number is too long": keys.JOBS + "{job}/generations/" + "9" * 5000,
        "a key of a newer version": keys.JOBS + "{job}/generations/000000000001/chunk",
    }.items():
        add(name, template, b"{}", is_fatal=False)
    for name, template, good in (
        ("state", keys.JOBS + "{job}/state", good_state(f"bad-{len(found)}")),
        ("member", keys.MEMBERS + "{job}/w0", good_member()),
    ):
        newer = as_json(good | {"added_later": {"x": [1]}})
        add(f"{name} of a newer version", template, newer, is_fatal=False)
    record = good_record(f"bad-{len(found)}") | {"added_later": 1}
    template = keys.JOBS + "{job}/generations/" + number
    add("generation of a newer version", template, as_json(record), is_fatal=False)
    return found


__all__ = ["Garbage", "all_garbage"]
