"""Waits for the device in a step that is like the one before.

On a GPU, reading a number waits for all work that was begun, and the next kernels are launched into
an idle GPU. Here ranks compute on the host and take the paths of a GPU: the one function that
distinguishes them answers as on a GPU.
"""

import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import Run, entered, take_step
from support.training import equality
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.loss_scale import update
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.amp import scale_of, scaler_state

WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
"""Operations that wait for a GPU, except copies."""
SOURCE = Path(shoal.__file__).parent
WARM_STEPS, STEPS = 8, 3
"""The first steps compare what the script and the samples change; the watch of parameters waits in
one step of 64."""
ALIKE = [
    "shoal.compression.gradient_exchange",
    "shoal.layouts.gathered_rows",
    "shoal.layouts.sharded.nan_propagating_reduce_scatter",
    "shoal.model.gradients",
    "shoal.strategies.layout.strategy",
    "shoal.strategies.rollback.parameter_watch",
]
"""Modules that ask if reading a tensor needs no wait."""

ALLOWED: dict[str, Counter[str]] = {
    # The check that averages are finite: the one wait of a step.
    "ddp": Counter({"model/gradients.py are_finite": 1}),
    # The same check, for an error on all ranks; it includes the loss.
    "zero1": Counter({"model/gradients.py are_finite": 1}),
    # Norms of this rank's rows; after that wait, the losses and the rows of which it has none.
    "zero2": Counter({"layouts/gradients.py name_of_fault": 1, "model/losses.py are_finite": 1}),
    "fsdp": Counter({"layouts/gradients.py name_of_fault": 1, "model/losses.py are_finite": 1}),
    # The wait comes before ranks meet, since the sum may hide whose fault it was.
    "tensor": Counter({"layouts/gradients.py name_of_fault": 1, "model/losses.py are_finite": 1}),
}


MADE: dict[str, Callable[[], Strategy]] = {
    "ddp": shoal.DDP,
    "zero1": partial(shoal.Zero1, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
}


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the places in Shoal where this thread waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            frames = traceback.extract_stack()
            own = [each for each in frames if Path(each.filename).is_relative_to(SOURCE)]
            in_optimizer = any("torch/optim" in each.filename for each in frames)
            if own and not in_optimizer:
                place = Path(own[-1].filename).relative_to(SOURCE)
                self.places[f"{place} {own[-1].name}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_gpus() -> Iterator[None]:
    """Make all tensors count as being on a GPU, for waits."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ALIKE:
            patched.setattr(importlib.import_module(name), "is_on_host", lambda _: False)
        yield


def waits_of_a_step(made: Callable[[], Strategy]) -> list[Counter[str]]:
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    run = Run(build=build, loader=equality.loader, loss=equality.loss)
    share, loader, found = entered(run, strategy), run.loader(), []
    for step in range(WARM_STEPS + STEPS):
        batch = loader.synchronous(step, *share)
        with Waits() as waits:
            take_step(strategy, batch, run.loss)
        found.append(waits.places)
    strategy.finish()
    strategy.close()
    return found[WARM_STEPS:]


@pytest.fixture
def one_thread_at_a_time() -> Iterator[None]:
    """Let each thread run until it waits. torch 2.11 crashes if two threads are the first to
    dispatch an operation to Python at the same time."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(600.0)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("on_gpus", "one_thread_at_a_time")
@pytest.mark.parametrize("name", ALLOWED)
def test_a_steady_step_waits_for_a_gpu_at_the_listed_places_only(name: str) -> None:
    for by_step in run_in_memory(waits_of_a_step, 2, MADE[name]):
        assert by_step == [ALLOWED[name]] * STEPS


def test_the_scale_of_a_scaler_is_read_only_if_others_have_written_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=1.1, growth_interval=2)
    scaler.scale(torch.ones(()))
    plain = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=1.1, growth_interval=2)
    plain.scale(torch.ones(()))
    scaler_state(scaler)
    with Waits() as waits:
        for overflowed in (False, False, True, False, False):
            update(scaler, overflowed=overflowed)
            assert scaler_state(scaler)["scale"] == scale_of(scaler)
    assert not waits.places
    for overflowed in (False, False, True, False, False):
        plain.load_state_dict({**plain.state_dict()})
        update(plain, overflowed=overflowed)
    assert scaler_state(scaler) == scaler.state_dict() == plain.state_dict()
    scale = scaler._scale
    assert scale is not None
    scale.fill_(8.0)
    assert scale_of(scaler) == 8.0
