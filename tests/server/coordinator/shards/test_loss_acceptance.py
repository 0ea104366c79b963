"""Acceptance of losses while etcd fails. tests/server/parameters/test_accepted_losses.py has the
rest, with servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.clusters.hooked_store import HookedStore, Transaction

from shoal_proto.errors import Unavailable
from shoal_proto.v1.shards_pb2 import AcceptLossRequest
from shoal_server.coordinator.shards.loss_acceptance import LossAcceptance
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.core.processes import Holder
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments as records

NUM_SHARDS = records.SHARDS_A_TRANSACTION + 1


class FailingStore(HookedStore):
    """Store that makes a number of writes, and is then away."""

    num_left = 1000

    async def before(self, transaction: Transaction) -> None:
        if transaction.puts:
            if self.num_left == 0:
                raise Unavailable("etcd is away")
            self.num_left -= 1


class NoLedger:
    """Ledgers of jobs that have trained on no samples."""

    async def counts(self, job: str) -> LedgerCounts | None:
        return None

    @asynccontextmanager
    async def closed_ledger(self, job: str) -> AsyncIterator[None]:
        yield


async def test_shards_that_were_given_up_before_etcd_failed_have_an_event() -> None:
    """The repeated request finds only the others lost, and reports these."""
    store, events = FailingStore(), list[str]()
    lost = [
        ShardAssignment(shard_id=i, epoch=1, primary=Holder("s", "1"), content=ShardContent.LOST)
        for i in range(NUM_SHARDS)
    ]
    await records.place(
        store, JobAssignments(job="j", copies=1, shards=tuple(lost), placement_id="r")
    )
    acceptance = LossAcceptance(
        LeaderStore(store, lambda: (), lambda reason: None),
        LossLog(lambda job, kind, reason: events.append(f"{kind}: {reason}")),
        NoLedger(),
        lambda: None,
    )
    request = AcceptLossRequest(job="j", by="ann")
    store.num_left = 1
    with pytest.raises(Unavailable):
        await acceptance.accept(request)
    assert len(events) == 1 and events[0].startswith("loss_accepted: the loss of shard 0 ")
    assert f" and {NUM_SHARDS - 1 - 8} more was accepted" in events[0]
    store.num_left = 1
    reply = await acceptance.accept(request)
    assert [shard.shard_id for shard in reply.shards if not shard.before] == [NUM_SHARDS - 1]
    assert len(events) == 2 and "of shard 100 (no version known) was accepted" in events[1]
