"""Waits for acknowledgements end if this server no longer leads the replica, or the caller is
gone."""

import asyncio
import weakref
from typing import cast

import pytest

from shoal_proto.errors import WrongEpoch
from shoal_proto.v1.acknowledgement_pb2 import ACKNOWLEDGEMENT_APPLIED
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import AcknowledgeVersion
from shoal_server.core.replication.protocol.events import AckAbandoned, AckRequested
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

ME = Holder("ps-0", "one")


class AcknowledgingDriver:
    """A driver whose core acknowledges every request."""

    acknowledgements: Acknowledgements

    def submit_event(self, event: object) -> None:
        assert isinstance(event, AckRequested)
        self.acknowledgements.acknowledge_version(AcknowledgeVersion(event.token))


class RecordingDriver:
    """A driver whose core acknowledges nothing."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def submit_event(self, event: object) -> None:
        self.events.append(event)


class Answer:
    """An answer that can be referred to weakly."""


def led_replica() -> ShardReplica:
    blocks = [Block(parameter="w", num_elements=1)]
    spec = Shard(shard_id=0, epoch=1, dtype="float32", blocks=blocks)
    sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)])
    replica = ShardReplica("job", new_dense_shard(spec, sgd, bytearray(4)), ReplicaRole.PRIMARY, 1)
    replica.is_led = True
    return replica


async def test_a_push_to_a_dropped_replica_is_not_acknowledged() -> None:
    """A wait on a replica that is no longer led_replica raises WrongEpoch, even if the core would
    acknowledge: the job's next run has shards with the same ids and epochs."""
    driver = AcknowledgingDriver()
    acknowledgements = driver.acknowledgements = Acknowledgements(cast(CoreDriver, driver), ME)
    replica = led_replica()
    await acknowledgements.wait(replica, 1, ACKNOWLEDGEMENT_APPLIED)
    replica.is_led = False
    with pytest.raises(WrongEpoch):
        await acknowledgements.wait(replica, 1, ACKNOWLEDGEMENT_APPLIED)


async def test_the_answer_of_an_abandoned_wait_is_freed() -> None:
    """The answer may have the values of a whole shard, and the version may stay unsafe for
    minutes."""
    driver = RecordingDriver()
    acknowledgements = Acknowledgements(cast(CoreDriver, driver), ME)
    answer = Answer()
    freed = weakref.ref(answer)
    waiting = acknowledgements.when_acknowledged(led_replica(), 1, ACKNOWLEDGEMENT_APPLIED, answer)
    del answer
    waiting.cancel()
    await asyncio.sleep(0)
    asked, abandoned = driver.events
    assert isinstance(asked, AckRequested) and isinstance(abandoned, AckAbandoned)
    assert abandoned.token is asked.token
    assert freed() is None
