"""Coordinators without the parameter-server half."""

import os
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
from structure.parameter_half import of_half
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import NoServers
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import clocks_pb2 as clocks
from shoal_proto.v1 import samples_pb2 as samples
from shoal_proto.v1 import shards_pb2 as shards
from shoal_proto.v1 import snapshots_pb2 as snapshots
from shoal_proto.v1.clocks_pb2_grpc import ClocksStub
from shoal_proto.v1.samples_pb2_grpc import SamplesStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_proto.v1.snapshots_pb2_grpc import SnapshotsStub

LEADS = """
import asyncio, sys
import shoal_server.coordinator.process
from shoal_server.coordinator.assembly import Coordinator
from shoal_server.core.limits import Limits
from support.clusters.memory_store import MemoryStore
from shoal_server.serving.rpc import new_server
from shoal_server.status.app import build_app

async def lead():
    async with Coordinator(MemoryStore(), Limits()).running() as coordinator:
        coordinator.add_services(new_server())
        build_app(coordinator.view, coordinator.board)
        await coordinator.lead(())
        await coordinator.step_down()

asyncio.run(lead())
print("\\n".join(sys.modules))
"""


@pytest.mark.long
def test_a_coordinator_without_parameters_loads_no_module_of_them() -> None:
    """The coordinator starts, leads and steps down in a process of its own, which then lists the
    modules that it has loaded."""
    run = subprocess.run(
        [sys.executable, "-c", LEADS],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60.0,
    )
    loaded = run.stdout.splitlines()
    assert "shoal_server.coordinator.assembly" in loaded
    assert of_half(loaded) == []
    assert "torch" not in loaded
    # This process has loaded the half, so that `of_half` finds its modules.
    assert "shoal_server.coordinator.parameters" in of_half(sys.modules)


async def test_members_train_and_calls_for_parameters_are_refused() -> None:
    """The refusal names the option. The status view shows the member, but no samples or shards."""
    async with served(MemoryStore(), parameters=False) as world:
        (a,) = await world.training("a")
        async with grpc.aio.insecure_channel(world.address) as channel:
            calls = (
                ClocksStub(channel).Advance(clocks.AdvanceRequest()),
                SamplesStub(channel).Lease(samples.LeaseRequest()),
                ShardsStub(channel).Place(shards.PlaceRequest()),
                SnapshotsStub(channel).Take(snapshots.TakeSnapshotRequest()),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                error = from_rpc_error(raised.value, world.address)
                assert isinstance(error, NoServers)
                assert "--no-parameters" in str(error)
        view = world.coordinator.view
        assert [detail.member.state for detail in view.jobs()[0].members] == ["training"]
        assert view.jobs()[0].samples is None
        assert await view.shards("j") is None
        assert a.token.generation == 1
