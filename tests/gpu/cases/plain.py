"""torch.distributed without Shoal: a check of the GPU, the driver and NCCL."""

import ctypes
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from gpu.case import Case
from gpu.machine import Machine
from gpu.member import use_gpu
from support.processes.ranks import Ranks, Report

MB = (1, 25, 150)
SMALL_MB = (1, 8)


def collectives(case: Case) -> None:
    """Check that all-reduce, all-gather and messages are exact with 1, 2 and 4 ranks."""
    for world_size in (1, 2, 4):
        path = str(case.directory / f"store-{world_size}")
        body = partial(_rank, case.machine, path, world_size)
        with Ranks() as ranks:
            started = [ranks.start(_named, body, rank) for rank in range(world_size)]
            found = [rank.expect("done", case.patience_s) for rank in started]
        slowest = {key: max(each[key] for each in found) for key in found[0] if key != "nccl"}
        for name, value in slowest.items():
            case.on_gpu_only(f"{name}_{world_size}", round(value, 4))
    case.on_gpu_only("nccl", found[0].get("nccl"))


def _named(report: Report, body: partial[None], rank: int) -> None:
    body(report, rank)


def _rank(machine: Machine, path: str, world_size: int, report: Report, rank: int) -> None:
    device = use_gpu(machine, rank)
    begun_s = time.perf_counter()
    dist.init_process_group(
        machine.backend,
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    dist.all_reduce(torch.ones(1, device=device))
    _wait(device)
    found: dict[str, object] = {"init_s": time.perf_counter() - begun_s}
    for megabytes in MB if machine.full else SMALL_MB:
        ones = torch.ones(megabytes * 250_000, device=device)
        dist.all_reduce(ones)
        assert bool((ones == world_size).all()), f"{megabytes} MB: {ones.unique().tolist()[:8]}"
        begun_s = time.perf_counter()
        dist.all_reduce(ones)
        _wait(device)
        found[f"all_reduce_{megabytes}_mb_ms"] = (time.perf_counter() - begun_s) * 1e3
    own = torch.full((1000,), float(rank), device=device)
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own)
    assert [float(part.mean()) for part in parts] == list(range(world_size))
    if world_size > 1:
        received = torch.empty_like(own)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, received, (rank - 1) % world_size),
            ]
        )
        for work in works:
            work.wait()
        assert float(received.mean()) == (rank - 1) % world_size
    if machine.backend == "nccl":
        found["nccl"] = nccl_version()
    report("done", **found)
    dist.barrier()
    dist.destroy_process_group()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def nccl_version() -> str:
    """The release of the NCCL that this process has loaded, possibly by LD_PRELOAD."""
    number = ctypes.c_int()
    assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) == 0
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"
