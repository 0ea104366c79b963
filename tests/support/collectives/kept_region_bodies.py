"""Bodies of ranks in the tests of kept regions, which run in separate processes."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from support.collectives.strategy_runs import (
    Run,
    by_one_process,
    difference,
    entered,
    generation_of,
    take_step,
)
from support.processes.ranks import Report

from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.opening import share_memory
from shoal.backends.shared_memory.regions import KeptRegions
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.layout.fsdp import FSDP
from shoal_proto.v1 import membership_pb2 as pb

LONG_S = 3600.0
NUM_BYTES = 1 << 16
MARK = b"of the first generation"


def reuse_memory(report: Report, path: str, rank: int, world_size: int, how: str) -> None:
    """Lose the last rank after the first generation. Report if the other ranks find, in the memory
    of the second generation, the mark that they wrote in the first."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    rest = dist.new_group(list(range(world_size - 1)))
    kept, whole = KeptRegions(), dist.group.WORLD
    assert whole is not None
    first = shared(whole, NUM_BYTES, kept)
    first.data[1024 : 1024 + len(MARK)] = MARK
    *_, process_id = first.gather_words(os.getpid())
    store.set(f"met {rank}", b"1")
    if rank == world_size - 1:
        # A rank still in the meeting would otherwise see it as broken.
        store.wait([f"met {each}" for each in range(world_size)])
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            first.close()
        store.set("gone", b"1")
        signal.pause()
    if how == "killed":
        _await_end(process_id)
    else:
        store.wait(["gone"])
    first.cut("the generation is over")
    first.close()
    second = shared(rest, NUM_BYTES // 2 if how == "left" else NUM_BYTES, kept)
    report("ended", again=bytes(second.data[1024 : 1024 + len(MARK)]) == MARK)
    for number in range(100):
        assert second.gather_words(number) == [number] * second.world_size
    dist.barrier(rest)


def shared(group: dist.ProcessGroup, num_bytes: int, kept: KeptRegions) -> SharedMemory:
    memory = share_memory(group, num_bytes, LONG_S, kept)
    assert memory is not None
    return memory


def _await_end(process_id: int) -> None:
    """Wait until the process has released all its resources. Its last thread does so, perhaps
    before the parent has reaped the process."""
    tasks, deadline_s = Path(f"/proc/{process_id}/task"), time.monotonic() + 60
    with suppress(FileNotFoundError):  # the parent has reaped it
        while any(map(_runs, tasks.glob("*/stat"))):
            assert time.monotonic() < deadline_s, "it lives on"
            time.sleep(0.001)


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def trained_in_generations(num_generations: int) -> tuple[list[bool], float]:
    """Train under `fsdp` over several generations. Returns, for each step, if it has the memory of
    the first one, and the difference of the weights from those of one process."""
    run = Run(build=_built, loader=_loader, loss=torch.nn.functional.mse_loss, num_steps=6)
    strategy = FSDP(min_group_bytes=0)
    share_of_rank, loader = entered(run, strategy), run.loader()
    rank, names = dist.get_rank(), [f"m{each}" for each in range(dist.get_world_size())]
    buffers, per_generation = [], run.num_steps // num_generations
    for step in range(run.num_steps):
        if step and step % per_generation == 0:
            strategy.abandon()
            number, kept = 1 + step // per_generation, dict.fromkeys(names, pb.STATE_ACTION_KEEP)
            strategy.enter(generation_of(names, names[rank], number, kept))
        memory = strategy._layout().shared_memory
        assert memory is not None
        buffers.append(memory.data.obj)
        take_step(strategy, loader.synchronous(step, *share_of_rank), run.loss)
    strategy.finish()
    weights = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
    strategy.close()
    return [buffer is buffers[0] for buffer in buffers], difference(weights, by_one_process(run))


def _built(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 8))
    return model, torch.optim.AdamW(model.parameters())


def _loader() -> Loader:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(48, 32, generator=generator), torch.randn(48, 8, generator=generator)
    return Loader(samples, Order(num_samples=48, global_batch_size=12, num_epochs=2))
