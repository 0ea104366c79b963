"""Shard logs: the version of an image, and the records after it without a gap."""

from dataclasses import dataclass

import pytest

from shoal_server.core.shards.shard_log import ShardLog


@dataclass(frozen=True)
class Sized:
    version: int
    num_bytes: int = 3


def filled(start: int, stop: int) -> ShardLog[Sized]:
    log = ShardLog[Sized](start)
    for version in range(start + 1, stop + 1):
        log.append(Sized(version))
    return log


def test_records_follow_the_image() -> None:
    log = filled(4, 7)
    assert (log.start, log.version, log.num_bytes) == (4, 7, 9)
    assert [each.version for each in log.records_after(5)] == [6, 7]
    assert [each.version for each in log.records_after(1)] == [5, 6, 7]
    assert list(log.records_after(7)) == []


def test_a_later_image_replaces_records() -> None:
    log = filled(4, 7)
    log.trim(6)
    log.trim(5)
    assert (log.start, log.version, log.num_bytes) == (6, 7, 3)
    assert [each.version for each in log.records_after(0)] == [7]
    log.trim(9)
    assert (log.start, log.version, log.num_bytes) == (7, 7, 0)
    log.append(Sized(8))
    log.restart_after(10)
    assert (log.start, log.version, log.num_bytes) == (10, 10, 0)


def test_a_record_after_a_gap_is_refused() -> None:
    with pytest.raises(AssertionError):
        filled(4, 7).append(Sized(9))
