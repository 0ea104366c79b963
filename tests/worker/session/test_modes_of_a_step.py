"""A step that is taken again runs in the modes in which it first began."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shoal
from shoal.strategies.synchronous.script_position import StepStopped


def network() -> Any:
    return nn.Sequential(OrderedDict(frozen=nn.BatchNorm1d(4), head=nn.Linear(4, 1)))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_a_step_that_stops_in_evaluation_mode_leaves_its_first_modes(
    strategy: str,
) -> None:
    """Regression: a member was lost while a script sampled from its model between `eval()` and
    `train()`. The others took that step again without dropout, with statistics of other batches."""
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    model = network()
    model.frozen.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join() as session:
        trained, optimizer = session.distribute(model, optimizer, strategy)
        for batch in session.batches((inputs, inputs[:, :1]), global_batch_size=4, epochs=1):
            with session.step() as step:
                session.backward(mse_loss(trained(batch.inputs), batch.targets))
                if batch.step == 1:
                    trained.eval()
                    raise StepStopped("as a lost member ends the block")
            assert step.committed == (batch.step != 1)
            assert trained.training
            assert not trained.get_submodule("frozen").training
            assert trained.get_submodule("head").training
            if batch.step == 1:
                break


def test_modes_that_a_committed_step_sets_stay() -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches((inputs, inputs[:, :1]), global_batch_size=4, epochs=1):
            with session.step():
                session.backward(mse_loss(model(batch.inputs), batch.targets))
                model.frozen.eval()
            assert model.training
            assert not model.frozen.training
