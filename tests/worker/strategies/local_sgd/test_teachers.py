"""Parameters that no optimizer has and that a script writes to: a teacher beside its student."""

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, entered, take_step, weights_of
from support.models.seeding import seeded
from support.training import equality
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.local_sgd.strategy import DiLoCo, LocalSGD

EVERY_STEPS = 2


class WithTeacher(equality.Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 7).requires_grad_(False)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        nn.init.constant_(self.frozen.bias, torch.nan)


def build(seed: int) -> tuple[nn.Module, Optimizer]:
    with seeded(seed):
        model = WithTeacher()
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.05)


def trained_on_a_rank(kind: type[LocalSGD], *, writes: bool) -> tuple[dict[str, Tensor], float]:
    """Return the state after one round in which only the last rank has written to its teacher, and
    the bytes that the round sent."""
    model, optimizer = build(0)
    strategy = kind(every_steps=EVERY_STEPS)
    run = Run(build=lambda _: (model, optimizer), loader=equality.loader, loss=equality.loss)
    share, loader = entered(run, strategy), equality.loader()
    for step in range(EVERY_STEPS):
        take_step(strategy, loader.synchronous(step, *share), equality.loss)
        if step == 0 and writes and dist.get_rank() == 1:
            with torch.no_grad():
                model.get_submodule("teacher").get_parameter("weight").add_(3.0)
    here = model.get_submodule("teacher").get_parameter("weight").detach()
    found = weights_of(strategy)
    assert found["teacher.weight"].equal(here)
    num_bytes = strategy.metrics()["bytes_sent"]
    strategy.close()
    return found, num_bytes


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_writes_to_a_teacher_are_averaged_at_the_end_of_the_round(
    kind: type[LocalSGD],
) -> None:
    """The average takes no outer step, and unwritten parameters are not sent. Regression: each
    member kept a teacher of its own, and a joiner got any of them."""
    before = build(0)[0].state_dict()
    written = run_in_memory(lambda: trained_on_a_rank(kind, writes=True), 2)
    for found, _ in written:
        torch.testing.assert_close(found["teacher.weight"], before["teacher.weight"] + 1.5)
        assert found["teacher.bias"].equal(before["teacher.bias"])
        assert found["frozen.weight"].equal(before["frozen.weight"])
        assert found["frozen.bias"].isnan().all()
    left_alone = run_in_memory(lambda: trained_on_a_rank(kind, writes=False), 2)
    for found, _ in left_alone:
        assert found["teacher.weight"].equal(before["teacher.weight"])
    # One all-reduce of two ranks: as many bytes as the teacher's weight has.
    assert written[0][1] - left_alone[0][1] == before["teacher.weight"].nbytes
