"""Tests of the parts of a step's time, as members report them."""

import threading

import pytest
import torch
from torch import nn

import shoal
from shoal.backends.abortable.waiter import OngoingCollective, waiting
from shoal.membership.health import HealthReporter
from shoal.session import step_reports
from shoal.session.step_reports import StepPartsMeter, StepTimes
from shoal_proto.health import HealthFigures, StepParts


def test_parts_add_up_to_the_time_from_step_to_step() -> None:
    """Times count from the end of the first step on: a long preparation may precede it."""
    meter = StepPartsMeter()
    meter.add(StepTimes(step_s=9.0, exchange_s=3.0, loading_s=2.0), 100.0)
    assert meter.read(2.0, 100.0) is None
    meter.add(StepTimes(step_s=0.5, exchange_s=0.25, loading_s=2.5), 101.0)
    meter.add(StepTimes(step_s=0.5, exchange_s=0.0, loading_s=2.5), 102.0)
    expected = StepParts(data_s=0.25, compute_s=0.375, exchange_s=0.125, between_s=0.25)
    assert meter.read(2.5, 102.0) == expected
    assert meter.read(2.5, 103.0) is None
    meter.add(StepTimes(step_s=1.0, exchange_s=0.0, loading_s=2.5), 104.0)
    assert meter.read(2.5, 104.0) == StepParts(
        data_s=0.0, compute_s=1.0, exchange_s=0.0, between_s=1.0
    )


def test_a_script_that_loads_its_own_batches_has_no_time_for_data() -> None:
    meter = StepPartsMeter()
    meter.add(StepTimes(step_s=1.0, exchange_s=0.0, loading_s=None), 1.0)
    meter.add(StepTimes(step_s=1.0, exchange_s=0.0, loading_s=None), 3.0)
    parts = meter.read(None, 3.0)
    assert parts == StepParts(data_s=None, compute_s=1.0, exchange_s=0.0, between_s=1.0)


def test_a_wait_counts_for_the_thread_that_waits() -> None:
    completion: torch.futures.Future[str] = torch.futures.Future()
    before_s, others = waiting.seconds, []

    def complete() -> None:
        completion.set_result("failed")
        others.append(waiting.seconds)

    thread = threading.Thread(target=complete)
    with pytest.raises(RuntimeError, match="failed"):
        thread.start()
        OngoingCollective(None, completion).wait()  # type: ignore[arg-type]
    thread.join()
    assert waiting.seconds > before_s
    assert others == [0.0]


def test_a_session_reports_the_parts_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps but the first are reported."""
    reported: list[StepParts] = []

    def note(self: HealthReporter, figures: HealthFigures) -> None:
        if figures.step_parts is not None:
            reported.append(figures.step_parts)

    monkeypatch.setattr(HealthReporter, "update", note)
    monkeypatch.setattr(step_reports, "INTERVAL_S", 1e-9)
    model: nn.Module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join("alone") as session:
        model, optimizer = session.distribute(model, optimizer)
        data = torch.randn(12, 2), torch.randn(12, 2)
        for batch in session.batches(data, global_batch_size=3):
            with session.step():
                session.backward((model(batch.inputs) - batch.targets).square().mean())
    assert len(reported) == 3
    for parts in reported:
        assert parts.data_s is not None
        assert parts.data_s > 0
        assert parts.compute_s > 0
        assert min(parts.exchange_s, parts.between_s) >= 0
