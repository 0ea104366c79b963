"""Coordinators that do not lead name the leader, or report that they know none, and why."""

import signal
from pathlib import Path

import grpc
import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import etcd_processes
from support.network import http
from support.processes.served_process import awaited

from shoal_proto.errors import NotLeader
from shoal_proto.status import from_rpc_error
from shoal_proto.v1.membership_pb2 import GetJobRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

WITHIN_S = 60.0
JOBS = "/api/v1/jobs"


def refused(coordinator: CoordinatorProcess) -> NotLeader:
    """Return the error with which this coordinator refuses a call."""
    with grpc.insecure_channel(coordinator.grpc) as channel, pytest.raises(grpc.RpcError) as raised:
        MembershipStub(channel).GetJob(GetJobRequest(job="j"), timeout=WITHIN_S)
    error = from_rpc_error(raised.value, coordinator.grpc)
    assert isinstance(error, NotLeader), error
    return error


@pytest.mark.long
def test_without_etcd_a_refusal_names_no_leader_and_names_etcd(tmp_path: Path) -> None:
    """The coordinator that does not lead names the leader again once etcd is back."""
    with etcd_processes(tmp_path) as (supervisor, (etcd,)):
        first = CoordinatorProcess(supervisor, tmp_path, "first", etcd.endpoint).ready()
        awaited(first.leads, WITHIN_S, "the first leads")
        second = CoordinatorProcess(supervisor, tmp_path, "second", etcd.endpoint).ready()
        assert refused(second).details["leader"] == first.grpc
        assert http.get(f"{second.http}{JOBS}").json()["kind"] == "NotLeader"
        etcd.process.send_signal(signal.SIGSTOP)
        try:
            awaited(lambda: not first.leads(), WITHIN_S, "the first no longer leads")
            awaited(
                lambda: "etcd does not answer" in http.get(f"{first.http}/readyz").text,
                WITHIN_S,
                "it reports the reason",
            )
            refusal = refused(first)
            assert refusal.details["leader"] == ""
            assert first.grpc not in refusal.seen + refusal.expected
            assert "etcd" in refusal.seen
            answer = http.get(f"{first.http}{JOBS}")
            assert (answer.status_code, answer.json()["kind"]) == (503, "NotLeader")
        finally:
            etcd.process.send_signal(signal.SIGCONT)
        awaited(lambda: first.leads() or second.leads(), WITHIN_S, "one of them leads")
        leader, other = (first, second) if first.leads() else (second, first)
        awaited(lambda: other.follows(leader.grpc), WITHIN_S, "the other names it")
