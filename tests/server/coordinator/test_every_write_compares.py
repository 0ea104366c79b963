"""Writes of a leading coordinator all compare the leader's key."""

import asyncio
from collections.abc import Sequence
from typing import Any

from support.clusters.coordinator_world import Served, served
from support.clusters.hooked_store import HookedStore, Transaction
from support.processes.served_process import awaited

from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.membership.member_session import MemberSession
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.repair_pb2 import RepairRequest
from shoal_proto.v1.repair_pb2_grpc import RepairsStub
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_proto.v1.samples_pb2_grpc import SamplesStub
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Get,
    created_at,
)
from shoal_server.etcd.records import assignments


class Watched(HookedStore):
    """Store that records writes which do not compare the leader's key, once there is a leader."""

    leader: Compare | None = None

    def __init__(self) -> None:
        super().__init__()
        self.unfenced: list[str] = []
        self.fenced: set[str] = set()

    async def before(self, transaction: Transaction) -> None:
        operations = (*transaction.then, *transaction.otherwise)
        written = [each.key for each in operations if not isinstance(each, Get)]
        if self.leader is not None and self.leader not in transaction.compares:
            self.unfenced += written
        else:
            self.fenced.update(written)


async def test_every_write_of_a_leader_compares_its_key() -> None:
    """Members join, train, lease samples and leave; jobs are repaired, reset and removed; the roots
    of snapshots are written."""
    store = Watched()
    await store.put(keys.job_state("bad"), b"garbage")
    shards = (ShardAssignment(shard_id=0, epoch=1, primary=Holder("ps-0", "1")),)
    await assignments.place(
        store, JobAssignments(job="over", copies=1, shards=shards, placement_id="r")
    )
    over = StateRecord(
        spec=JobSpec(job="over"), last_generation=Generation(1), finished=True, reason="done"
    )
    await store.put(keys.job_state("over"), state_to_json(over))
    revision = await store.put(keys.LEADER, b"{}")
    store.leader = created_at(keys.LEADER, revision)
    async with served(store, conditions=[store.leader]) as world:
        await asyncio.to_thread(_make_all_calls, world, await world.training("a", "b"), store)
    assert store.unfenced == []
    families = {
        keys.SNAPSHOT_ROOTS,
        keys.member("j", "a"),
        keys.job_state("j"),
        keys.generation("j", 1),
        keys.sample_ledger("j"),
        keys.job_state("bad"),
        keys.assignments("over"),
        keys.reset("bad"),
    }
    assert families <= store.fenced


def _make_all_calls(world: Served, members: Sequence[MemberSession], store: Watched) -> None:
    coordinators = Coordinators([world.address])

    def call(method: Method[Any], request: object) -> None:
        coordinators.call(lambda _: method, request, timeout_s=10.0)

    try:
        channel = coordinators.channel()
        lease = LeaseRequest(
            token=members[0].token, num_samples=4, dataset_size=8, num_epochs=1, sequence=1
        )
        call(SamplesStub(channel).Lease, lease)
        call(RepairsStub(channel).Repair, RepairRequest(job="bad", apply=True))
        call(MembershipStub(channel).ResetJob, pb.ResetJobRequest(job="bad"))
        members[1].leave(completed=False, reason="it has had enough")
    finally:
        coordinators.close()
    expected = {keys.sample_ledger("j"), keys.assignments("over")}
    awaited(lambda: expected <= store.fenced, 10.0, "ledger and assignments are written")
