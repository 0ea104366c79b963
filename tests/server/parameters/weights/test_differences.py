"""Differences between segments that a server makes for readers, if it has memory for them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_server.core.processes import Holder
from shoal_server.etcd.memory import MemoryStore
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.differences import WeightDifferences

LIMIT_S = 10.0
NUM_BYTES = 4096


def sealed(data: bytes) -> Segment:
    writer = SegmentWriter(len(data))
    writer.buffer[:] = data
    return writer.seal()


async def test_there_is_no_difference_if_memory_runs_out_meanwhile() -> None:
    """The memory was free when the difference was begun. The reader then fetches the whole
    segment."""
    base, target = sealed(bytes(NUM_BYTES)), sealed(bytes(NUM_BYTES - 4) + b"\1\2\3\4")
    received = Budget(NUM_BYTES)
    memory = Memory(NUM_BYTES, Catalog(MemoryStore(), Holder("ps-0", "one")), received)
    goes_on = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(goes_on.wait, LIMIT_S)
        differences = WeightDifferences(memory, threads)
        making = asyncio.ensure_future(
            differences.between("job/policy", base, target, [(4, NUM_BYTES)])
        )
        # The call starts in the first turn of the event loop, and its task in the second.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert memory.held_bytes
        received.reserve(NUM_BYTES)
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            assert await making is None
    assert memory.held_bytes == NUM_BYTES
