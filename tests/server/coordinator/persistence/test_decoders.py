"""Decoders of records: any content of etcd is read as a value or refused with a named error.

A coordinator can read every record that it writes from requests of members.
"""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.clusters.garbage import good_member, good_record, good_state

from shoal_proto.errors import InternalError, InvalidSpec, ShoalError
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.replication_pb2 import JobHoldings, ShardHolding
from shoal_server.coordinator.jobs.requests import joined
from shoal_server.coordinator.parameters import check_record
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_json import state_from_json, state_to_json
from shoal_server.coordinator.repair import inspection
from shoal_server.coordinator.repair.inspection import RecordKind
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress
from shoal_server.core.generations.roster import Generation, Step
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import Refusal
from shoal_server.etcd import keys, leader_key
from shoal_server.etcd.api import KeyValue, Revision
from shoal_server.etcd.json_fields import UnreadableRecord
from shoal_server.etcd.records import servers
from shoal_server.serving.message_bounds import MessageBounds

JOB = "job"
few = settings(max_examples=40, deadline=None)
GOOD: dict[RecordKind, tuple[str, dict[str, object]]] = {
    RecordKind.STATE: (keys.job_state(JOB), good_state(JOB)),
    RecordKind.GENERATION: (keys.generation(JOB, 1), good_record(JOB)),
    RecordKind.MEMBER: (keys.member(JOB, "w0"), good_member()),
    RecordKind.SAMPLES: (
        keys.sample_ledger(JOB),
        {
            "format": 1,
            "dataset_size": 8,
            "num_epochs": 1,
            "num_closed": 0,
            "closed_returned": 0,
            "ignored": 0,
            "closed": [],
            "open": [],
            "members": {},
        },
    ),
    RecordKind.EARLIER_RUNS: (
        keys.reset(JOB),
        {"last_generation": 3, "expelled": ["x"], "ended_unix_s": 1.5},
    ),
    RecordKind.SHARDS: (
        keys.shard_map(JOB),
        {"format": 1, "digest": "d", "num_chunks": 1, "num_bytes": 7},
    ),
}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 2**53, "NaN", "Infinity", "1e999", "", "w0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def at(key: str, value: bytes) -> KeyValue:
    return KeyValue(key, value, Revision(1), Revision(1), 1)


def is_read(key: str, value: bytes) -> bool:
    """True if the record can be read. Errors that do not name the record are raised."""
    return inspection.unreadable_records(JOB, [at(key, value)], check_record) == []


def test_good_records_are_read() -> None:
    """The other tests change these records. The shard map alone is broken: it lacks its chunk."""
    for kind, (key, value) in GOOD.items():
        assert inspection.kind_of(JOB, key) is kind
        assert is_read(key, json.dumps(value).encode()) == (kind is not RecordKind.SHARDS), kind


@few
@given(value=st.binary(max_size=200))
@example(value=b"")
@example(value=b"\xff\xfe\x00")
@example(value=b"[" * 100_000)
def test_any_bytes_are_read_or_refused_with_a_named_error(value: bytes) -> None:
    for key, _ in GOOD.values():
        is_read(key, value)
    for key in (keys.assignments_head(JOB), keys.shard_assignment(JOB, "run", 7)):
        is_read(key, value)
    try:
        servers.parse(keys.server("ps-0"), value)
    except ShoalError as error:
        assert "ps-0" in str(error)
    assert leader_key.parsed(value, Revision(7)).create_revision == 7


@pytest.mark.long
@few
@given(value=json_values)
def test_any_json_is_read_or_refused_with_a_named_error(value: object) -> None:
    for key, _ in GOOD.values():
        is_read(key, json.dumps(value).encode())


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", GOOD)
@few
@given(data=st.data())
def test_records_with_one_changed_value_are_read_or_refused_with_a_named_error(
    kind: RecordKind, data: st.DataObject
) -> None:
    """The changed value has a wrong type, is huge, is NaN or is missing."""
    key, good = GOOD[kind]
    value = json.loads(json.dumps(good))
    inside: Any = value
    while isinstance(inside, dict | list) and inside:
        places = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        place = data.draw(st.sampled_from(places))
        if not isinstance(inside[place], dict | list) or data.draw(st.booleans()):
            if data.draw(st.booleans()) and isinstance(inside, dict):
                del inside[place]
            else:
                inside[place] = data.draw(json_values)
            break
        inside = inside[place]
    is_read(key, json.dumps(value).encode())


@few
@given(data=st.binary(max_size=60))
def test_records_of_holders_are_read_or_refused_with_a_named_error(data: bytes) -> None:
    """The bytes follow a good message, so that the whole often parses."""
    head = JobHoldings(job=JOB, run="run", num_shards=1).SerializeToString()
    shard = ShardHolding(run="run", shard_id=7, epoch=1, content=1).SerializeToString()
    is_read(keys.assignments_head(JOB), head + data)
    is_read(keys.shard_assignment(JOB, "run", 7), shard + data)


# --- records that a coordinator writes can be read again ---

whole = st.integers(0, 65535) | st.sampled_from([0, 1, 8, 65535, 65536, 2**31, 2**32 - 1])
big = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**53 - 1, 2**53, 2**63, 2**64 - 1])


@st.composite
def attendances(draw: st.DrawFn) -> pb.AttendRequest:
    low, most = sorted([draw(whole), draw(whole)])
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=100) | st.just("x" * 5000)
    return pb.AttendRequest(
        token=Token(job=JOB, member_id="w0", incarnation="1", generation=draw(big)),
        spec=pb.JobSpec(
            job=JOB,
            min_members=max(low, 1),
            max_members=max(most, 1),
            desired_members=max(low, 1),
            last_call_s=draw(st.floats(0, 1e10) | st.floats()),
        ),
        info=pb.MemberInfo(
            host=draw(texts),
            pid=draw(whole),
            address=draw(texts),
            device=draw(texts),
            num_devices=draw(whole),
            probe_port=draw(whole),
        ),
    )


def is_accepted(message: object) -> bool:
    try:
        MessageBounds().check(message)
    except InvalidSpec:
        return False
    return True


@few
@given(request=attendances(), step=big)
@example(
    request=pb.AttendRequest(
        token=Token(job=JOB, member_id="w0", incarnation="1"),
        spec=pb.JobSpec(job=JOB, min_members=1, max_members=2**32 - 1, desired_members=1),
    ),
    step=0,
)
@example(
    request=pb.AttendRequest(
        token=Token(job=JOB, member_id="w0", incarnation="1"),
        spec=pb.JobSpec(job=JOB, min_members=1, max_members=1, desired_members=1),
        info=pb.MemberInfo(probe_port=70_000),
    ),
    step=2**60,
)
def test_records_of_accepted_requests_can_be_read(request: pb.AttendRequest, step: int) -> None:
    """An accepted request leaves no record for which a coordinator would quarantine the job at its
    next start."""
    if not is_accepted(request):
        return
    event = joined(request)
    assert event.spec.problem() == ""
    reached = step if is_accepted(pb.SettleRequest(step=step)) else 0
    state = StateRecord(
        spec=event.spec,
        last_generation=Generation(1),
        finished=False,
        reason="",
        progress=JobProgress(trained_in=Generation(1), reached=Step(reached)),
    )
    assert state_from_json(JOB, state_to_json(state)) == state
    stored = codec.member_to_json(event.incarnation, event.info)
    assert codec.member_from_json(stored) == (event.incarnation, event.info)


def test_a_request_beyond_the_bound_of_its_record_is_refused() -> None:
    """The bounds of requests must lie within those of records."""
    info = pb.MemberInfo(host="h", probe_port=70_000)
    with pytest.raises(UnreadableRecord):
        codec.member_from_json(codec.member_to_json("1", codec.info_from_pb(info)))
    assert not is_accepted(pb.AttendRequest(info=info))


def test_members_are_sent_each_limit_that_they_need() -> None:
    """Limits that are computed from others are sent as well."""
    message = codec.limits_to_pb(Limits())
    assert {each.name for each, _ in message.ListFields()} == set(
        pb.Limits.DESCRIPTOR.fields_by_name
    )


@pytest.mark.parametrize("kind", ["OfALaterRelease", "Mapping", "Any"])
def test_a_refusal_that_names_no_error_becomes_an_internal_error(kind: str) -> None:
    """The kind of such a refusal is not an error class, even if the module of the errors has that
    name."""
    error = codec.refusal_to_error(Refusal(kind=kind, what="refused"), 1)
    assert type(error) is InternalError
    assert error.what == "refused"
