"""Ranks over NCCL in separate processes, each with its own GPU, or all on one that NCCL lets them
share."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Ranks, Report

from shoal.backends.network.own_gpu import SHARES_GPU, shares_gpu


def lacks_gpus(world_size: int) -> str:
    """Return the reason to skip a test with `world_size` ranks over NCCL; empty if it can run."""
    count = torch.cuda.device_count()
    if dist.is_nccl_available() and count and (count >= world_size or shares_gpu(os.environ)):
        return ""
    return (
        f"{world_size} ranks over NCCL need as many CUDA devices, or one and {SHARES_GPU}=1 with"
        f" NCCL 2.30; here are {count}"
    )


def gpu_of(rank: int) -> int:
    """Return the index of this rank's GPU."""
    return rank % torch.cuda.device_count()


def run_on_nccl(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `body(*arguments)` on each rank, on GPU r modulo their number; returns the results."""
    with tempfile.TemporaryDirectory() as directory, Ranks() as ranks:
        path = os.path.join(directory, "store")  # noqa: PTH118 - what FileStore takes
        started = [
            ranks.start(_on_gpu, path, (rank, world_size), body, arguments)
            for rank in range(world_size)
        ]
        return [rank.expect("returned")["value"] for rank in started]


def _on_gpu(
    report: Report,
    path: str,
    place: tuple[int, int],
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank, world_size = place
    torch.cuda.set_device(gpu_of(rank))
    store = dist.FileStore(path, world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    report("returned", value=body(*arguments))
    dist.barrier()
    dist.destroy_process_group()
