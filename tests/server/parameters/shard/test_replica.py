"""Work on a shard: the event loop never waits for the shard's lock."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.workers import INLINE_BYTES, Workers

SPEC = Shard(shard_id=1, epoch=1, dtype="float32", blocks=[Block(parameter="w", num_elements=4)])
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
LIMIT_S = 30.0


@pytest.fixture
def run() -> Iterator[Workers]:
    with ThreadPoolExecutor(2) as pool:
        yield Workers(pool)


def new_replica() -> ShardReplica:
    state = new_dense_shard(SPEC, SGD, bytearray(16))
    return ShardReplica("job", state, ReplicaRole.PRIMARY, 1)


async def test_small_work_is_done_at_once(run: Workers) -> None:
    """Small work runs in the caller's thread if the shard has no other work."""
    done = new_replica().work(run, 1, threading.get_ident)
    assert isinstance(done, asyncio.Future) and done.done()
    assert await done == threading.get_ident()


async def test_small_work_does_not_wait_for_the_lock(run: Workers) -> None:
    """The loop continues while another thread has the lock; a thread does the work later."""
    replica, entered, leave = new_replica(), threading.Event(), threading.Event()

    def hold(version: int) -> None:
        entered.set()
        assert leave.wait(LIMIT_S)

    holder = threading.Thread(target=lambda: replica.state.read(hold))
    holder.start()
    assert entered.wait(LIMIT_S)
    version = replica.work(run, 1, lambda: replica.state.read(lambda version: version))
    assert not asyncio.ensure_future(version).done()
    leave.set()
    async with asyncio.timeout(LIMIT_S):
        assert await version == 1
    holder.join()


async def test_work_is_done_in_the_order_of_its_calls(run: Workers) -> None:
    """Small work does not overtake large work."""
    replica, order, go_on = new_replica(), list[int](), threading.Event()

    def large() -> None:
        assert go_on.wait(LIMIT_S)
        order.append(0)

    begun = [replica.work(run, INLINE_BYTES + 1, large)]
    begun += [replica.work(run, 1, lambda i=i: order.append(i)) for i in range(1, 5)]  # type: ignore[misc]
    # After one turn of the loop, the large work has its thread.
    await asyncio.sleep(0)
    begun.append(replica.work(run, 1, lambda: order.append(5)))
    go_on.set()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*begun)
    assert order == list(range(6))
    done = replica.work(run, 1, lambda: order.append(6))
    assert isinstance(done, asyncio.Future) and done.done()
