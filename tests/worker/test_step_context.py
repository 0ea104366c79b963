"""The context of a step belongs to one thread, and ends with the step."""

import threading

import torch
from torch import nn

import shoal
from shoal.step_context import NO_STEP, StepContext, current


def test_a_step_sets_all_of_its_context_and_removes_it() -> None:
    """A thread started within the step has no context: it computes on no samples of the step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[StepContext] = []
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy="ddp")
        data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
        for batch in session.batches(data, global_batch_size=2, epochs=1):
            assert current() == NO_STEP
            with session.step():
                context = current()
                thread = threading.Thread(target=lambda: found.append(current()))
                thread.start()
                thread.join()
                session.backward(nn.functional.mse_loss(model(batch.inputs), batch.targets))
            assert current() == NO_STEP
    assert context.samples is not None
    assert (context.samples.first, context.samples.count) == (0, 2)
    assert context.parts is not None
    assert context.guard is not None
    assert found == [NO_STEP] * 2
