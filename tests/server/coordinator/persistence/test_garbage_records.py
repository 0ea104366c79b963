"""Unreadable records in etcd stop their own job, and nothing else."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.etcd_fixture import running_etcd
from support.clusters.garbage import Garbage, all_garbage
from support.members.scripted_member import Script, ScriptedMember
from support.network import http
from support.processes.served_process import ServedProcess, awaited

from shoal_client.connection.coordinators import Coordinators
from shoal_client.local.process import Supervisor
from shoal_proto.errors import JobQuarantined, UnknownJob
from shoal_proto.v1.membership_pb2 import GetJobRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.etcd import keys
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

GARBAGE = all_garbage()
CALL_S = 20.0


async def _write(endpoint: str) -> None:
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        for each in GARBAGE:
            for key, value in each.entries.items():
                await store.put(key, value)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with Supervisor(grace_s=1.0) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def written(etcd: str) -> str:
    """Write all garbage to etcd before any process reads it."""
    asyncio.run(_write(etcd))
    return etcd


@pytest.fixture(scope="module")
def coordinator(written: str, supervisor: Supervisor, folder: Path) -> CoordinatorProcess:
    """Start a coordinator that leads with all this garbage in etcd."""
    started = CoordinatorProcess(supervisor, folder, "coordinator", written).ready()
    awaited(started.leads, CALL_S, "the coordinator leads")
    return started


@pytest.mark.parametrize("garbage", GARBAGE, ids=[each.what for each in GARBAGE])
def test_only_its_own_job_is_quarantined(coordinator: CoordinatorProcess, garbage: Garbage) -> None:
    """Calls for such a job get the key in the error; a harmless record goes unnoticed."""
    coordinators = Coordinators([coordinator.grpc])
    try:
        refused = pytest.raises(JobQuarantined) if garbage.is_fatal else suppress(UnknownJob)
        with refused as raised:
            coordinators.call(
                lambda channel: MembershipStub(channel).GetJob,
                GetJobRequest(job=garbage.job),
                timeout_s=CALL_S,
            )
    finally:
        coordinators.close()
    if raised is not None:
        assert raised.value.details == {"job": garbage.job, "key": garbage.key}


def test_other_jobs_train(coordinator: CoordinatorProcess) -> None:
    """Two members form a generation, and the leader's term continues."""
    scripts = [Script(job="good", member_id=name) for name in ("a", "b")]
    members = [ScriptedMember([coordinator.grpc], script).start() for script in scripts]
    try:
        for member in members:
            member.await_training_with("a", "b")
        assert coordinator.leads()
        assert "leadership_ended" not in coordinator.log_path.read_text()
    finally:
        for member in members:
            member.close()


def test_the_list_of_jobs_shows_the_quarantined_ones(coordinator: CoordinatorProcess) -> None:
    jobs = {each["job"]: each for each in http.get(f"{coordinator.http}/api/v1/jobs").json()}
    for garbage in GARBAGE:
        if garbage.is_fatal:
            assert jobs[garbage.job]["phase"] == "quarantined"
            assert garbage.key in jobs[garbage.job]["reason"]
    assert http.get(f"{coordinator.http}/metrics", timeout=CALL_S).status_code == 200


@pytest.mark.long
def test_a_parameter_server_starts_with_unreadable_records_in_etcd(
    written: str, supervisor: Supervisor, folder: Path
) -> None:
    """The server watches assignments of all jobs, and logs the unreadable ones."""
    server = ServedProcess(
        supervisor, folder, "ps", "ps", "--etcd", written, "--listen", "127.0.0.1:0", "--id", "ps-0"
    ).ready()
    assert server.runs
    assert keys.ASSIGNMENTS in server.log_path.read_text()


def test_the_shard_controller_skips_unreadable_records(coordinator: CoordinatorProcess) -> None:
    """The controller logs each record that it cannot read."""
    broken = [each for each in GARBAGE if each.what.startswith("assignments")]

    def are_logged() -> bool:
        text = coordinator.log_path.read_text()
        return all(text.count(each.key + " ") + text.count(each.key + "\n") > 0 for each in broken)

    awaited(are_logged, CALL_S, "the controller logs all of them")
    assert "shards_not_rebalanced" not in coordinator.log_path.read_text()
