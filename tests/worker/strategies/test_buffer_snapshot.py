"""Buffers that a state_dict leaves out are copied once, and again when they were written."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shoal.strategies.rollback import buffer_snapshot
from shoal.strategies.rollback.buffer_snapshot import BufferSnapshot


class Masked(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.fixture
def on_gpus() -> Iterator[None]:
    """Within, nothing is on the host as far as copies go."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buffer_snapshot, "is_on_host", lambda _: False)
        yield


def copies_in(snapshot: BufferSnapshot, model: nn.Module) -> int:
    """How many copies the next step makes."""
    with pytest.MonkeyPatch.context() as patched:
        made: list[Tensor] = []
        plain = Tensor.clone

        def cloned(self: Tensor) -> Tensor:
            made.append(self)
            return plain(self)

        patched.setattr(Tensor, "clone", cloned)
        snapshot.keep(model)
    return len(made)


@pytest.mark.usefixtures("on_gpus")
def test_a_buffer_that_nobody_writes_is_copied_once() -> None:
    snapshot, model = BufferSnapshot(), Masked()
    assert [copies_in(snapshot, model) for _ in range(3)] == [1, 0, 0]
    model.mask.mul_(2)
    assert [copies_in(snapshot, model) for _ in range(2)] == [1, 0]
    # Another one in its place, with as few writes.
    model.mask = torch.full((3,), 5.0)
    assert [copies_in(snapshot, model) for _ in range(2)] == [1, 0]


@pytest.mark.usefixtures("on_gpus")
def test_what_a_step_writes_is_taken_back_each_time() -> None:
    snapshot, model = BufferSnapshot(), Masked()
    for _ in range(3):
        snapshot.keep(model)
        model.mask.add_(1)
        assert snapshot.changed() == ["mask"]
        snapshot.restore()
        assert model.mask.tolist() == [1.0, 1.0, 1.0]
    snapshot.keep(model)
    model.mask.add_(1)
    snapshot.clear()
    snapshot.keep(model)
    model.mask.zero_()
    snapshot.restore()
    assert model.mask.tolist() == [2.0, 2.0, 2.0]
