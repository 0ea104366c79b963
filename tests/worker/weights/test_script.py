"""Publications of a process that is not a member: one series does not wait for another."""

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.weights.memory_series import MemoryContributor, MemoryReader, MemorySeries

from shoal.weights import script
from shoal.weights import series as publishing
from shoal.weights.series import PendingPublication, PublisherRank, held_state
from shoal.weights.subscription import reader_id
from shoal_proto.errors import InvalidSpec, PublicationAbandoned

LIMIT_S = 10.0
STATE = {"w": torch.ones(3)}


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, MemorySeries]]:
    """Series in memory, by name."""
    found: defaultdict[str, MemorySeries] = defaultdict(MemorySeries)

    def connect(addresses: object, name: str, publisher: object, **_: Any) -> MemoryContributor:
        return found[name].connect(PublisherRank(number=1, rank=0, world_size=1))

    monkeypatch.setattr(script, "SeriesPublisher", connect)
    yield found
    for name, each in found.items():
        each.holds.set()
        script.end_publishing(name)


def test_a_slow_publication_holds_up_neither_other_series_nor_the_end(
    series: dict[str, MemorySeries], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second publication waits for the first. Its series is released all the same, and then
    published anew."""
    waits = threading.Semaphore(0)

    def noted(*args: Any, **options: Any) -> Any:
        waits.release()
        return held_state(*args, **options)

    with ThreadPoolExecutor(3) as pool:

        def publish(name: str) -> PendingPublication:
            return script.publish(name, STATE, coordinator="here:1")

        series["job/slow"].holds.clear()
        first = publish("job/slow")
        monkeypatch.setattr(script, "held_state", noted)
        second = pool.submit(publish, "job/slow")
        try:
            assert waits.acquire(timeout=LIMIT_S)
            other = pool.submit(publish, "job/quick").result(LIMIT_S)
            assert other.wait("committed", LIMIT_S) is not None
            monkeypatch.setattr(script, "CLOSE_S", 0.05)
            monkeypatch.setattr(publishing, "CLOSE_S", 0.05)
            pool.submit(script.end_publishing, "job/slow").result(LIMIT_S)
            with pytest.raises(PublicationAbandoned, match="the series was released"):
                second.result(LIMIT_S).wait("committed", LIMIT_S)
        finally:
            series["job/slow"].holds.set()
        assert first.step == 0
        assert publish("job/slow").wait("committed", LIMIT_S) is not None


def test_a_publication_that_began_during_the_wait_is_committed_before_the_end(
    series: dict[str, MemorySeries], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end has waited its first 30 s for the other thread's call."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        return held_state(*args, **options)

    monkeypatch.setattr(script, "held_state", slow)
    monkeypatch.setattr(script, "CLOSE_S", 0.01)
    series["job/late"].holds.clear()
    with ThreadPoolExecutor(2) as pool:
        published = pool.submit(script.publish, "job/late", STATE, coordinator="here:1")
        assert begun.wait(LIMIT_S)
        ended = pool.submit(script.end_publishing, "job/late")
        for each in (goes_on, series["job/late"].holds):
            with pytest.raises(TimeoutError):
                ended.result(0.3)
            each.set()
        ended.result(LIMIT_S)
        assert published.result(LIMIT_S).wait("committed", 0) is not None


def test_a_forked_process_does_not_release_the_series_of_its_parent(
    series: dict[str, MemorySeries], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that ends, or ends publishing, leaves its parent's connections alone."""
    closed: list[MemoryContributor] = []

    def close(contributor: MemoryContributor) -> None:
        closed.append(contributor)

    monkeypatch.setattr(MemoryContributor, "close", close)
    script.publish("job/held", STATE, coordinator="here:1").wait("committed", LIMIT_S)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        script.end_publishing("job/held")
        os.write(writing, str(len(closed)).encode())
        signal.pause()
    try:
        assert os.read(reading, 100) == b"0"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    script.end_publishing("job/held")
    assert len(closed) == 1


def test_readers_of_one_name_do_not_end_each_others_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator takes reports of one id for those of one process."""
    ids = []

    def connect(addresses: object, series: str, reader: str, **_: object) -> MemoryReader:
        ids.append(reader)
        return MemoryReader(MemorySeries())

    monkeypatch.setattr(script, "SeriesReader", connect)
    for _ in range(2):
        script.subscribe("job/policy", coordinator="here:1", reader="eval")
    assert all(each.startswith("eval-") for each in ids)
    assert len(set(ids)) == 2
    # As many as of five series with the most readers: with 24 random bits some are the same.
    assert len({reader_id("eval") for _ in range(20_000)}) == 20_000
    for invalid in ("", "bad name", "x" * 128):
        with pytest.raises(InvalidSpec, match="bad name of a reader"):
            script.subscribe("job/policy", coordinator="here:1", reader=invalid)


@pytest.mark.parametrize("step", [-1, 2**53])
def test_a_step_that_no_message_can_carry_is_refused(step: int) -> None:
    with pytest.raises(InvalidSpec, match="step is out of range"):
        script.publish("job/steps", STATE, coordinator="here:1", step=step)


def test_a_script_that_reads_or_publishes_logs_no_details() -> None:
    """The level is info, as in a member of a job."""
    code = (
        "import shoal, structlog\n"
        "shoal.subscribe('job/policy', coordinator='127.0.0.1:1').close()\n"
        "structlog.get_logger().debug('detail')\n"
        "structlog.get_logger().info('event')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    printed = done.stdout + done.stderr
    assert "event" in printed
    assert "detail" not in printed
