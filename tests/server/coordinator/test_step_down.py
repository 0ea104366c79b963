"""A coordinator that steps down while clients call it."""

import grpc.aio
import pytest
from support.clusters.coordinator_world import served

from shoal_proto.errors import NotLeader, ShoalError
from shoal_proto.status import from_rpc_error
from shoal_proto.v1.weights_pb2 import WatchSeriesRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub
from shoal_server.etcd.memory import MemoryStore


async def test_a_watch_that_begins_during_the_step_down_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The series of the term have ended at that time. If the coordinator leads again, it reads them
    anew, and would never notify a watch that began in between."""
    refusals: list[ShoalError] = []
    async with served(MemoryStore()) as world:
        registry = world.coordinator.registry
        step_down = registry.step_down

        async def watched() -> None:
            async with grpc.aio.insecure_channel(world.address) as channel:
                request = WatchSeriesRequest(series="script/policy")
                try:
                    await WeightSeriesStub(channel).Watch(request, timeout=10.0).read()
                except grpc.aio.AioRpcError as error:
                    refusals.append(from_rpc_error(error, world.address))
            await step_down()

        monkeypatch.setattr(registry, "step_down", watched)
    assert [type(each) for each in refusals] == [NotLeader]
