"""Updates of a parameter server that the bench finds lost, or applied but not logged by a
worker."""

import json
from typing import Any

import pytest
import torch


@pytest.fixture
def async_trace() -> Any:
    import async_trace  # noqa: PLC0415 - bench/ is on the path of a test only

    return async_trace


def line(*samples: int) -> str:
    return json.dumps(samples) + "\n"


def test_updates_that_all_arrived_are_counted_once(async_trace: Any) -> None:
    """The weights of the worker that left last contain the pushes of all workers."""
    left = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 1.0, 1.0])]
    found = async_trace.counted(left, [[line(0, 1)], [line(0, 2)]])
    assert (found.pushes, found.samples_lost, found.samples_unlogged) == (2, 0, 0)


def test_an_acknowledged_update_that_is_missing_is_lost(async_trace: Any) -> None:
    found = async_trace.counted([torch.tensor([1.0, 0.0, 0.0])], [[line(0, 1), line(1, 2)]])
    assert (found.samples_lost, found.samples_unlogged) == (3, 0)


def test_an_update_that_no_worker_wrote_down_is_counted_separately(async_trace: Any) -> None:
    """A worker was killed before it wrote its line, or in the middle of the line."""
    found = async_trace.counted([torch.tensor([2.0, 1.0, 1.0])], [[line(0, 1), line(0, 2)[:4]]])
    assert (found.pushes, found.samples_lost, found.samples_unlogged) == (1, 0, 2)
