"""Ranks over NCCL in processes of their own, each with a GPU."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Ranks, Report


def run_on_nccl(world_size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `body(*arguments)` returns on each rank; rank r has GPU r."""
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
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    report("returned", value=body(*arguments))
    dist.barrier()
    dist.destroy_process_group()
