"""Bodies of ranks of which rank 1 fails between two collectives; the others continue until they get
an error."""

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from support.processes.gpu_ranks import gpu_of
from support.processes.load import unhurried
from support.processes.ranks import Report
from support.training.rank_bodies import AbortableFileStore

from shoal.backends.abortable.communicators import add_subgroups
from shoal.backends.network.nccl import NcclBackend
from shoal.backends.process_group.interface import Seat
from shoal_proto.errors import GenerationBroken

FAILING = 1
MAX_ROUNDS = 10_000


class Broken(Exception):
    """The error that rank 1 raises."""


def one_raises() -> None:
    _go_on("raise")


def one_is_killed() -> None:
    _go_on("kill")


def one_does_not_come() -> None:
    _go_on("stop")


def _go_on(how: str, device: str = "cpu") -> None:
    for number in range(MAX_ROUNDS):
        if number == 3 and dist.get_rank() == FAILING:
            if how == "raise":
                raise Broken("on purpose")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        total = torch.ones(4, device=device)
        dist.all_reduce(total)
        assert total.sum().isfinite()  # waits for the GPU
    raise AssertionError("no error reached this rank")


def over_gloo(report: Report, path: str, rank: int, world_size: int, how: str) -> None:
    """Fail over torch's own Gloo, within the deadline of the group."""
    limit = timedelta(seconds=unhurried(2.0))
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    try:
        _go_on(how)
    except RuntimeError as error:
        report("failed", text=str(error))


def over_nccl(report: Report, path: str, rank: int, world_size: int, how: str) -> None:
    """Fail over a session's NCCL group, within the deadline of its collectives: 2 s."""
    torch.cuda.set_device(gpu_of(rank))
    seat = Seat(
        generation=1,
        rank=rank,
        world_size=world_size,
        address="127.0.0.1",
        bring_up_s=30,
        collective_s=2,
    )
    backend = NcclBackend()
    group = backend.group(seat, AbortableFileStore(path, world_size))
    group.open()
    try:
        _go_on(how, "cuda")
    except RuntimeError as error:
        report("failed", recognised=backend.is_failure(error))
        group.cut("a rank failed")
        group.retire()


def cut_over_nccl(report: Report, path: str, rank: int) -> None:
    """Cut rank 0 with a collective in progress in two groups, while rank 1 hangs."""
    torch.cuda.set_device(gpu_of(rank))
    seat = Seat(
        generation=1, rank=rank, world_size=2, address="127.0.0.1", bring_up_s=30, collective_s=60
    )
    group = NcclBackend().group(seat, AbortableFileStore(path, 2))
    whole = group.open()
    subgroup = dist.new_group([0, 1])
    add_subgroups([subgroup], whole, torch.device("cuda", torch.cuda.current_device()))
    if rank == FAILING:
        signal.pause()
    for within in (whole, subgroup):
        dist.all_reduce(torch.ones(1 << 22, device="cuda"), group=within, async_op=True)
    started_s = time.perf_counter()
    group.cut("the test said so")
    try:
        group.check()
    except GenerationBroken:
        report("checked", seconds=time.perf_counter() - started_s)
    group.retire()
    report("retired", seconds=time.perf_counter() - started_s)
