"""Generations that are over leave nothing behind: no connection, no thread."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.collectives.strategy_runs import generation_of, take_step, use_groups
from support.processes.served_process import awaited
from support.training import equality
from torch import nn

import shoal
from shoal.backends.network import retired
from shoal.backends.network.gloo import GlooBackend
from shoal.backends.process_group.interface import Group, Seat
from shoal.data.batches import Loader
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.c10d import HashStore
from shoal_proto.v1 import membership_pb2 as pb

STRATEGIES: Mapping[str, Callable[[], SynchronousStrategy]] = {
    "ddp": shoal.DDP,
    "zero1": shoal.Zero1,
    "fsdp": partial(shoal.FSDP, min_group_bytes=100),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0),
    "fsdp-tensor": partial(shoal.FSDPTensor, min_split_bytes=0, min_group_bytes=100),
    "pipeline": shoal.Pipeline,
    "hybrid": partial(shoal.Hybrid, pipeline=1, data=1, tensor=1),
}


class OwnStore(HashStore):
    def abort(self, reason: str) -> None:
        raise AssertionError("nobody cuts a group in these tests")


def in_use() -> tuple[int, int]:
    """Count the descriptors and threads of this process."""
    own = Path("/proc/self")
    return len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))


def new_group(seat: Seat) -> Group:
    return GlooBackend().group(replace(seat, bring_up_s=60, collective_s=60), OwnStore())


def live_for_a_generation(strategy: SynchronousStrategy, number: int, batches: Loader) -> None:
    states = {"m0": pb.STATE_ACTION_KEEP} if number > 1 else None
    strategy.enter(generation_of(["m0"], "m0", number, states))
    for _ in range(2):
        take_step(strategy, batches.synchronous(strategy.step, 0, 1), equality.loss)
    strategy.abandon()
    assert retired.free_now(30)  # all of them are idle


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_generation_leaves_no_descriptor_and_no_thread(name: str) -> None:
    """Python's garbage collector is disabled: its time is unpredictable."""
    strategy = STRATEGIES[name]()
    use_groups(strategy, new_group)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 4))
    strategy.distribute(model, torch.optim.AdamW(model.parameters()))
    batches = equality.loader()
    gc.collect()
    gc.disable()
    try:
        live_for_a_generation(strategy, 1, batches)
        before = in_use()
        for number in range(2, 6):
            live_for_a_generation(strategy, number, batches)
        # A thread that Python has joined may still be ending.
        awaited(lambda: in_use() <= before, 10, "nothing is left")
    finally:
        gc.enable()
        strategy.close()
