"""Limit of log lines about an event that repeats."""

import structlog
from structlog.testing import capture_logs

from shoal_proto.traces.log_limit import LogLimit


def test_later_lines_of_an_event_are_rare_and_count_the_others() -> None:
    now_s = 0.0
    with capture_logs() as lines:
        limit = LogLimit(structlog.get_logger(), each_s=10.0, clock=lambda: now_s)
        for _ in range(81):
            limit.info("retried", num_shards=2)
            limit.info("another")
            now_s += 0.125
    logged = [(line["event"], line.get("num_left_out", 0)) for line in lines]
    assert logged == [("retried", 0), ("another", 0), ("retried", 79), ("another", 79)]
