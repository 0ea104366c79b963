"""Bodies of members with NCCL's groups; Gloo stands in for NCCL on machines without a GPU."""

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Report
from support.training.rank_bodies import AbortableFileStore

from shoal.backends.abortable.communicators import connect
from shoal.backends.abortable.waiter import AbortableWaiter
from shoal.backends.network import retired
from shoal.backends.network.nccl import Aborts, NcclGroup
from shoal.backends.process_group.interface import Seat
from shoal.backends.process_group.transports import can_be_cut, is_gloo
from shoal.backends.shared_memory.messages import SharedMessages
from shoal.checkpoint.peers import GroupPeers
from shoal_proto.errors import GenerationBroken, InvalidSpec

ABORTED: list[Any] = []
"""Backends whose abort was called."""


class StandIn:
    """A device "cuda" to which no tensor is ever moved."""

    kind, transport = "cuda", "gloo"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def identity(self) -> str:
        return f"GPU-{self._rank}"

    def connect(self, group: dist.ProcessGroup, waiter: AbortableWaiter) -> None:
        """Do nothing: there is nothing to connect."""

    def synchronise(self) -> None:
        """Do nothing: no work runs."""

    def fault(self) -> str:
        return ""


class CountedAborts(Aborts):
    """Aborts that only record their backends, as Gloo has no abort."""

    def begin(self, backends: Any) -> None:
        ABORTED.extend(each for each in backends if each not in ABORTED)


def _group(path: str, rank: int, device: StandIn | None = None, generation: int = 1) -> NcclGroup:
    seat = Seat(
        generation=generation,
        rank=rank,
        world_size=2,
        address="127.0.0.1",
        bring_up_s=60,
        collective_s=60,
    )
    store = AbortableFileStore(f"{path}.{generation}", 2)
    group = NcclGroup(seat, store, device or StandIn(rank))
    group._aborts = CountedAborts()
    return group


def host_part(report: Report, path: str, rank: int) -> None:
    group = _group(path, rank)
    whole = group.open()
    subgroup = dist.new_group([0, 1])
    words = SharedMessages(whole, 1)
    words.enable_shared_memory()
    words.send_values([10 + rank])
    report(
        "found",
        can_be_cut=[can_be_cut(whole), can_be_cut(subgroup)],
        is_gloo=[is_gloo(whole), is_gloo(subgroup)],
        words_are_shared=words.is_shared,
        watches_peers=GroupPeers(subgroup)._wait is not None,
        received=words.receive_values(),
    )
    dist.barrier()
    words.close()
    group.retire()


def cut(report: Report, path: str, rank: int, where: str) -> None:
    """Cut rank 0's group while it waits in a collective for rank 1, which does not join it."""
    group = _group(path, rank)
    whole = group.open()
    subgroup = dist.new_group([0, 1])
    within = whole if where == "in_a_collective" else subgroup
    dist.all_reduce(torch.ones(1), group=within)
    if rank == 1:
        threading.Event().wait()  # until the test ends it
    blocked = threading.Event()
    cutter = threading.Thread(target=lambda: (blocked.wait(), group.cut("the test said so")))
    cutter.start()
    started_s = time.perf_counter()
    try:
        blocked.set()
        dist.all_reduce(torch.ones(1 << 20), group=within)
    except RuntimeError:
        report("cut", seconds=time.perf_counter() - started_s)
    cutter.join()
    try:
        group.check()
    except GenerationBroken:
        group.retire()
        report("retired", is_initialized=dist.is_initialized(), aborted=len(ABORTED))


class StuckGroup:
    """A group whose first operation waits for ever."""

    def __init__(self, entered: threading.Event) -> None:
        self._entered = entered

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._entered.set()
        threading.Event().wait()


class Connecting(StandIn):
    """Stand-in whose communicator is never made."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.entered = threading.Event()

    def connect(self, group: dist.ProcessGroup, waiter: AbortableWaiter) -> None:
        lonely: Any = StuckGroup(self.entered)
        connect(lonely, torch.device("cpu"), waiter)


def cut_in_bring_up(report: Report, path: str, rank: int) -> None:
    device = Connecting(rank)
    group = _group(path, rank, device)
    cut_s: list[float] = []

    def cut_it() -> None:
        device.entered.wait()
        cut_s.append(time.perf_counter())
        group.cut("the test said so")

    cutter = threading.Thread(target=cut_it)
    cutter.start()
    try:
        group.open()
    except GenerationBroken as error:
        report("broken", seconds=time.perf_counter() - cut_s[0], text=str(error))
    cutter.join()
    group.retire()


def on_one_gpu(report: Report, path: str, rank: int) -> None:
    group = _group(path, rank, StandIn(0))
    try:
        group.open()
    except InvalidSpec as refused:
        report("refused", seen=refused.seen)
    group.retire()


def generations(report: Report, path: str, rank: int, num: int) -> None:
    """Report the number of descriptors and threads that were added from the third generation to the
    last."""
    found: list[tuple[int, int]] = []
    for number in range(1, num + 1):
        group = _group(path, rank, generation=number)
        group.open()
        dist.all_reduce(torch.ones(1))
        subgroup = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=subgroup)
        dist.barrier()
        if number % 2:
            group.cut("the test said so")
        ABORTED.clear()
        del subgroup
        group.retire()
        assert retired.free_now(30.0)
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count()))  # noqa: PTH208
    (first_fds, first_threads), (last_fds, last_threads) = found[2], found[-1]
    report("done", descriptors=last_fds - first_fds, threads=last_threads - first_threads)
