"""Segments that a server makes of its shards: their sizes, and their memory."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from shoal_proto.errors import Overloaded
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights.cut_segments import MIN_ROWS, num_positions
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.peers import WeightPeers
from shoal_server.parameters.weights.store import SegmentOrigin

LIMIT_BYTES = 1 << 20


def test_numbers_of_positions_rise_by_an_eighth_at_most() -> None:
    before = 0
    for num_rows in range(5000):
        count = num_positions(num_rows)
        assert count >= max(num_rows, MIN_ROWS, before) and count % 8 == 0
        assert count <= max(MIN_ROWS, num_rows * 9 / 8 + 8)
        before = count
    assert len({num_positions(each) for each in range(5000)}) < 60


async def test_a_segment_without_memory_is_refused_and_takes_none() -> None:
    memory = Memory(LIMIT_BYTES, SimpleNamespace(shards=list), Budget(1))  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        holdings = WeightHoldings(memory, threads, WeightPeers(threads))

        def filled(memory: memoryview) -> None:
            memory[:4] = b"rows"

        async def make(publication: int, num_bytes: int) -> None:
            origin = SegmentOrigin(epoch=1, publication=publication, rank=1)
            await holdings.make("job/model", num_bytes, origin, filled)

        await make(1, LIMIT_BYTES // 2)
        with pytest.raises(Overloaded):
            await make(2, LIMIT_BYTES)
        assert [each.segment.num_bytes for each in holdings.held()] == [LIMIT_BYTES // 2]
        holdings.abandon("job/model", 1, 1, [1])
        await asyncio.sleep(0)
        await make(3, LIMIT_BYTES)
        holdings.close()
