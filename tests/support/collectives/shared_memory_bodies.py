"""Bodies of ranks in the tests of shared memory, which run in separate processes."""

import gc
import os
import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models.sharded_models import deep, lay_out, sgd, training_of
from support.processes.ranks import Report
from support.processes.worlds import LaidOutTraining, train_rank
from torch import Tensor

from shoal.backends.abortable.reduce_scatter import reduce_scatter
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.messages import SharedMessages
from shoal.backends.shared_memory.opening import share_memory
from shoal.layouts.base import World
from shoal.layouts.sharded.all_gather import SharedMemoryAllGather
from shoal.layouts.sharded.layout import ShardedLayout
from shoal.layouts.sharded.shared_slots import NUM_GATHERED, SharedSlots
from shoal.state.shards import StateShard
from shoal.state.shared_exchange import SharedExchange
from shoal_proto.errors import GenerationBroken

LONG_S = 3600.0


def whole_world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def shared(num_bytes: int = 4096, limit_s: float = LONG_S) -> SharedMemory:
    memory = share_memory(whole_world(), num_bytes, limit_s)
    assert memory is not None
    return memory


def run_barriers(num_barriers: int) -> int:
    """Run rounds in which each rank reads, after a barrier, what all ranks wrote before it."""
    memory = shared()
    numbers = memory.data.cast("Q")
    for number in range(num_barriers):
        at = number % 2 * memory.world_size
        numbers[at + memory.rank] = 1000 * number + memory.rank
        gathered_words = memory.gather_words(10 * number + memory.rank)
        ranks = range(memory.world_size)
        assert gathered_words == [10 * number + rank for rank in ranks]
        assert list(numbers[at : at + memory.world_size]) == [1000 * number + r for r in ranks]
    memory.close()
    return len(memory.data)


def exchange_values(num_rounds: int, *, shares: bool) -> str:
    """Run rounds in which each rank receives all ranks' values. Returns the error of sending after
    a round that no rank received."""
    messages = SharedMessages(whole_world(), 3)
    if shares:
        messages.enable_shared_memory()
    assert messages.is_shared is shares
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in range(num_rounds):
        messages.send_values([number, -rank, (1 << 62) + rank])
        values = messages.receive_values()
        assert values == [[number, -each, (1 << 62) + each] for each in range(world_size)]
    messages.send_values([1])
    dist.barrier()
    messages.forget()
    try:
        messages.send_values([2])
    except GenerationBroken as error:
        return str(error)
    return ""


def receive_after_a_cut(*, all_send: bool) -> tuple[Any, str]:
    """Return what a rank receives after a cut, if all ranks, or all but the last, sent values
    before it; and the error of sending again."""
    messages = SharedMessages(whole_world(), 1)
    messages.enable_shared_memory()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for number in range(3):
        messages.send_values([number])
        messages.receive_values()
    if all_send or rank < world_size - 1:
        messages.send_values([10 + rank])
    dist.barrier()
    messages.cut("on purpose")
    received: Any = "nothing sent"
    if messages.has_sent:
        try:
            received = messages.receive_values()
        except GenerationBroken as error:
            received = str(error)
    try:
        messages.send_values([3])
    except GenerationBroken as error:
        return received, str(error)
    return received, ""


def gathered(most: int) -> list[bool]:
    """Return if ranks receive each other's messages in memory, which has a page for each rank:
    short ones, of several lengths, and one of `most` bytes from the last rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = SharedExchange(shared(4096 * world_size))
    received = []
    for length in (0, 7, most if rank == world_size - 1 else 3):
        messages = exchange.gather(bytes([rank]) * (length + rank), 1 << 20)
        whole = messages is not None
        assert messages is None or all(set(each) <= {r} for r, each in enumerate(messages))
        assert messages is None or messages[rank] == bytes([rank]) * (length + rank)
        received.append(whole)
    return received


def is_shared(apart: int = -1, num_bytes: int = 4096) -> bool:
    """True if memory is shared. The rank `apart` is configured to share none."""
    if dist.get_rank() == apart:
        os.environ["SHOAL_TRANSPORT"] = "tcp"
    return share_memory(whole_world(), num_bytes, LONG_S) is not None


def meet_until_a_rank_is_missing(
    report: Report, path: str, rank: int, world_size: int, how: str
) -> None:
    """Let all ranks meet; at the fourth barrier one of them is missing, by fault `how`."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    failing = 0 if how == "kill rank 0" else 1
    memory = shared(limit_s=0.5 if how == "stop" else LONG_S)
    try:
        for number in range(4):
            if number == 3 and rank == failing:
                if how.startswith("kill"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stop":
                    signal.pause()
                # The cut comes while this rank waits: the others do not arrive.
                assert how == "cut"
                threading.Timer(0.05, memory.cut, ("on purpose",)).start()
            elif number == 3 and how == "cut":
                memory.data[0] = 1
                while not memory.reason:
                    signal.sigtimedwait([signal.SIGUSR1], 0.005)
            memory.gather_words()
    except GenerationBroken as error:
        report("failed", text=str(error))


def leave_early() -> str:
    """Let rank 0 leave in order, which all others notice. Returns their error."""
    memory = shared()
    memory.gather_words()
    links = [each for each in threading.enumerate() if each.name == "shoal-links"]
    if memory.rank == 0:
        memory.close()
    for thread in links:
        thread.join()
    if memory.rank == 0:
        for _ in range(2):
            try:
                memory.gather_words()
            except GenerationBroken as error:
                assert "this rank has left" in str(error)
    return memory.reason


def meet_after_a_fork() -> str:
    """Close the memory in a forked process. Returns the reason if ranks could not meet then, else
    nothing."""
    memory = shared()
    memory.gather_words()
    child = os.fork()
    if not child:
        memory.close()
        os._exit(0)
    os.waitpid(child, 0)
    for _ in range(3):
        memory.gather_words()
    dist.barrier()
    return memory.reason


def descriptors_after(num_generations: int) -> list[int]:
    """Count this process' descriptors after each layout is released and dropped, without help from
    the cyclic garbage collector."""
    training, group = training_of(deep, sgd, num_steps=2), whole_world()
    counts = []
    gc.collect()
    gc.disable()
    for number in range(num_generations):
        world = World(
            rank=group.rank(),
            world_size=group.size(),
            device=torch.device("cpu"),
            group=group,
            generation=number,
        )
        trained = LaidOutTraining(training, lay_out(min_group_bytes=150), world)
        # Listed before the last barrier: after it another rank may have left already.
        links = [each for each in threading.enumerate() if each.name == "shoal-links"]
        assert len(links) == 1, "nothing is shared"
        trained.run()
        trained.layout.release()
        del trained
        links[0].join()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def barriers_of_steps(num_steps: int) -> tuple[int, list[int]]:
    """Return the number of groups that the model is cut into, and of barriers in each step."""
    training, group = training_of(deep, sgd, num_steps=1), whole_world()
    world = World(
        rank=group.rank(), world_size=group.size(), device=torch.device("cpu"), group=group
    )
    trained = LaidOutTraining(training, lay_out(min_group_bytes=150), world)
    layout = trained.layout
    assert isinstance(layout, ShardedLayout)
    memory = layout.shared_memory
    assert memory is not None
    counts = [memory.num_barriers]
    for _ in range(num_steps):
        trained.run()
        counts.append(memory.num_barriers)
    return len(layout._gatherings), [after - before for before, after in pairwise(counts)]


def slots(gathered_bytes: int = 4096, summed_bytes: int = 4096) -> SharedSlots:
    opened = SharedSlots.open(whole_world(), gathered_bytes, summed_bytes, LONG_S)
    assert opened is not None
    return opened


def sums(dtype: torch.dtype, num_rounds: int) -> list[tuple[bool, bool]]:
    """Return, for sums and means of tensors in a slot and elsewhere, if they were reduced in shared
    memory, and if the bits are the same as over Gloo."""
    opened, group = slots(), whole_world()
    world_size, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(num_rounds):
        op = dist.ReduceOp.AVG if number % 2 else dist.ReduceOp.SUM
        whole = torch.randn(world_size * 33, generator=generator).to(dtype)
        ours, theirs = (torch.empty(33, dtype=dtype) for _ in range(2))
        given = whole
        if number % 3:
            slot = opened.reserve_sum(whole.nbytes)
            assert slot is not None
            given = slot.view(dtype)
            given.copy_(whole)
        done = opened.reduce_scatter(ours, given, op)
        reduce_scatter(theirs, whole, group, op)
        found.append((done, torch.equal(ours, theirs)))
    return found


def too_large() -> bool:
    opened, world_size = slots(summed_bytes=4096), dist.get_world_size()
    whole = torch.ones(world_size * 2048)
    return opened.reduce_scatter(torch.empty(2048), whole, dist.ReduceOp.SUM)


def gathered_and_kept(num_kept: int) -> list[bool]:
    """Gather repeatedly while the last `num_kept` outputs are kept. Returns, for each check, if a
    kept output is unchanged."""
    opened, group = slots(), whole_world()
    gathering = SharedMemoryAllGather(opened)
    kept: list[tuple[Tensor, Tensor]] = []
    sound, places = [], set()
    for number in range(12):
        output = gathering.allocate((group.size() * 5,), dtype=torch.float32, device=_CPU)
        mine = output.narrow(0, 5 * group.rank(), 5)
        mine.fill_(100 * number + group.rank())
        work = gathering(output, mine, group)
        if work is not None:
            work.wait()
        expected = torch.arange(group.size()).repeat_interleave(5) + 100.0 * number
        places.add(output.data_ptr())
        kept.append((output, expected))
        del output, mine
        sound += [torch.equal(*each) for each in kept]
        del kept[: max(0, len(kept) - num_kept)]
    # With all slots in use, the next output is allocated elsewhere.
    sound.append((len(places) > NUM_GATHERED) == (num_kept >= NUM_GATHERED - 1))
    return sound


def trained(transport: str, options: dict[str, Any]) -> StateShard:
    os.environ["SHOAL_TRANSPORT"] = transport
    return train_rank(training_of(deep, sgd, accumulate=2, num_steps=6), lay_out(**options))


_CPU = torch.device("cpu")
