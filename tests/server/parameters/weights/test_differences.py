"""Differences between segments that a server makes for readers, if it has memory for them."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs
from support.clusters.memory_store import MemoryStore
from support.weights.segments import segment_of

from shoal_proto.segments.sealed import Segment
from shoal_server.core.processes import Holder
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights import differences as module
from shoal_server.parameters.weights.differences import KEPT_S, WeightDifferences

LIMIT_S = 10.0
NUM_BYTES = 4096
SERIES = "job/policy"
ELEMENTS = [(4, NUM_BYTES)]


def changed(number: int) -> Segment:
    """A segment that differs from zeros in one element."""
    return segment_of(bytes(NUM_BYTES - 4) + number.to_bytes(4))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def memory_beside(received: Budget) -> Memory:
    """Memory for one difference, less what is received."""
    return Memory(NUM_BYTES, Catalog(MemoryStore(), Holder("ps-0", "one")), received)


async def begin(
    differences: WeightDifferences, memory: Memory, base: Segment, target: Segment
) -> "asyncio.Future[Segment | None]":
    """Return a request whose difference is being made."""
    making = asyncio.ensure_future(differences.between(SERIES, base, target, ELEMENTS))
    # The call starts in the first turn of the event loop, and its task in the second.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert memory.held_bytes
    return making


async def test_there_is_no_difference_if_memory_runs_out_meanwhile() -> None:
    """The memory was free when the difference was begun. The reader then fetches the whole
    segment."""
    base, target, received = segment_of(bytes(NUM_BYTES)), changed(1), Budget(NUM_BYTES)
    memory, goes_on = memory_beside(received), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(goes_on.wait, LIMIT_S)
        differences = WeightDifferences(memory, threads)
        making = await begin(differences, memory, base, target)
        received.reserve(NUM_BYTES)
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            assert await making is None
    assert memory.held_bytes == NUM_BYTES


async def test_a_difference_is_made_once_there_is_memory_again(
    threads: ThreadPoolExecutor,
) -> None:
    base, target, received = segment_of(bytes(NUM_BYTES)), changed(1), Budget(NUM_BYTES)
    differences = WeightDifferences(memory_beside(received), threads)
    received.reserve(NUM_BYTES)
    assert await differences.between(SERIES, base, target, ELEMENTS) is None
    received.release(NUM_BYTES)
    assert await differences.between(SERIES, base, target, ELEMENTS) is not None


async def test_no_difference_is_logged_as_made_if_too_much_has_changed(
    threads: ThreadPoolExecutor,
) -> None:
    base, target = segment_of(bytes(NUM_BYTES)), segment_of(b"\1" * NUM_BYTES)
    differences = WeightDifferences(memory_beside(Budget(NUM_BYTES)), threads)
    with capture_logs() as logged:
        assert await differences.between(SERIES, base, target, ELEMENTS) is None
    assert [each["event"] for each in logged] == ["difference_not_made"]


async def test_differences_that_are_requested_or_fetched_are_kept_the_longest(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    now_s = 0.0
    differences = WeightDifferences(memory_beside(Budget(NUM_BYTES)), threads, now_s=lambda: now_s)
    base, targets = segment_of(bytes(NUM_BYTES)), [changed(number) for number in range(1, 5)]

    async def made(number: int) -> bytes:
        difference = await differences.between(SERIES, base, targets[number], ELEMENTS)
        assert difference is not None
        return difference.digest

    digests = [await made(number) for number in range(3)]
    assert await made(0) == digests[0]
    assert differences.find(SERIES, digests[1]) is not None
    digests.append(await made(3))
    assert differences.find(SERIES, digests[2]) is None
    now_s = KEPT_S - 1
    assert differences.find(SERIES, digests[1]) is not None
    now_s = KEPT_S
    differences.sweep()
    assert [differences.find(SERIES, each) is not None for each in digests] == [
        False,
        True,
        False,
        False,
    ]


async def test_a_difference_that_is_made_after_the_end_takes_no_memory() -> None:
    memory, goes_on = memory_beside(Budget(NUM_BYTES)), threading.Event()
    base, target = segment_of(bytes(NUM_BYTES)), changed(1)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(goes_on.wait, LIMIT_S)
        differences = WeightDifferences(memory, threads)
        making = await begin(differences, memory, base, target)
        differences.close()
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            assert await making is None
    assert memory.held_bytes == 0
