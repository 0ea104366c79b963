"""The client of the worker's SDK, where a scripted member might be too patient."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from support.clusters.coordinator_processes import Replicas
from support.clusters.coordinator_world import FIELDS
from support.processes.served_process import awaited

from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1 import membership_pb2 as pb

FORM_S = 60.0


def _member(replicas: Replicas, job: str, name: str) -> MemberSession:
    spec = pb.JobSpec(job=job, min_members=1, max_members=8, desired_members=3)
    return MemberSession(
        Member(
            coordinators=replicas.addresses,
            spec=spec,
            member_id=name,
            incarnation=new_incarnation(),
            info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
        )
    )


def _enter(member: MemberSession, above: int) -> pb.GenerationRecord:
    record = member.await_generation(above, FORM_S)
    member.ready(record)
    return record


def _join(member: MemberSession) -> pb.GenerationRecord:
    member.join(FORM_S)
    member.propose(FIELDS, synchronous=True, step=0, has_state=False)
    return _enter(member, 0)


def _is_back(member: MemberSession) -> bool | None:
    return "a new leader took over" in member.waiting_for or None


@contextmanager
def _training(replicas: Replicas, job: str) -> Iterator[list[MemberSession]]:
    members = [_member(replicas, job, name) for name in ("a", "b", "c")]
    try:
        with ThreadPoolExecutor(len(members)) as threads:
            list(threads.map(_join, members))
        yield members
    finally:
        for each in members:
            each.close()


@pytest.mark.sampled()
@pytest.mark.parametrize("num_settled", [0, 1])
def test_a_leader_may_die_between_a_loss_and_the_next_generation(
    replicas: Replicas, num_settled: int
) -> None:
    """Survivors report their step again to the successor, and form the next generation there."""
    with _training(replicas, f"client-{num_settled}") as (a, b, c):
        c.leave(completed=False, reason="the test asked for it")
        for member in (a, b):
            assert member.await_break(1, FORM_S)
        for member in (a, b)[:num_settled]:
            member.settle(3, has_state=True)
        old = replicas.leader()
        old.process.send_signal(signal.SIGKILL)
        replicas.leader(other_than=old)
        for member in (a, b):
            awaited(partial(_is_back, member), FORM_S, "it attends at the new leader")
        for member in (a, b)[num_settled:]:
            member.settle(3, has_state=True)
        with ThreadPoolExecutor(2) as threads:
            records = list(threads.map(lambda member: _enter(member, 1), (a, b)))
        assert records[0] == records[1]
        assert [entry.member_id for entry in records[0].roster.entries] == ["a", "b"]
