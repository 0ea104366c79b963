"""The shard journal: what one server writes to its disk about the shards that it leads."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.tables.restore import restore

LIMIT_S = 10.0


def new_led(epoch: int) -> ShardReplica:
    spec = Shard(
        shard_id=0, epoch=epoch, dtype="float32", blocks=[Block(parameter="p", num_elements=2)]
    )
    sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
    return ShardReplica("job", new_dense_shard(spec, sgd, bytearray(8)), ReplicaRole.PRIMARY, epoch)


class HeldDisk:
    """Disk on which a sync waits while `goes_on` is not set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()

    def fsync(self, descriptor: int) -> None:
        assert self.goes_on.wait(LIMIT_S)
        os.fsync(descriptor)


async def test_a_shard_of_a_new_run_replaces_that_of_the_last_run(tmp_path: Path) -> None:
    """The new run's epoch is lower, and the disk is slow to forget the old shard."""
    loop, disk = asyncio.get_running_loop(), HeldDisk()
    on_disk: asyncio.Queue[int] = asyncio.Queue()

    async def take(replica: ShardReplica) -> ShardImage:
        return replica.image()

    def note_epoch(replica: ShardReplica, version: int) -> None:
        on_disk.put_nowait(replica.epoch)

    config = JournalConfig(directory=tmp_path)
    with ThreadPoolExecutor(1) as pool, Journal(config, fsync=disk.fsync) as journal:
        kept = ShardJournal(
            journal, pool, take=take, on_disk=note_epoch, on_failure=lambda replica: None
        )
        async with kept, asyncio.timeout(LIMIT_S):
            last, now = new_led(epoch=5), new_led(epoch=1)
            kept.start_journaling(last)
            assert await on_disk.get() == 5
            disk.goes_on.clear()
            kept.end(last)
            kept.release_job("job", but=())
            kept.start_journaling(now)
            loop.call_later(0.1, disk.goes_on.set)
            assert await on_disk.get() == 1
    (found,) = Journal(config).recover(restore)
    assert found.epoch == 1


def make_unreadable(directory: Path) -> None:
    """Replace the only image of a journal by a directory."""
    (path,) = directory.glob("images/job/*")
    path.unlink()
    path.mkdir()


async def test_a_shard_whose_image_cannot_be_read_counts_as_missing(tmp_path: Path) -> None:
    """An error would end the task that loads the shard, which would not report it as missing."""

    async def take(replica: ShardReplica) -> ShardImage:
        return replica.image()

    config = JournalConfig(directory=tmp_path)
    with ThreadPoolExecutor(1) as pool, Journal(config) as journal:
        with new_led(epoch=1).image() as image:
            journal.put_image("job", 1, image)
        make_unreadable(tmp_path)
        kept = ShardJournal(
            journal,
            pool,
            take=take,
            on_disk=lambda replica, version: None,
            on_failure=lambda replica: None,
        )
        assert await kept.read("job", 0, restore) is None
