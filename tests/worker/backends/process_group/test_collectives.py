"""Contract of all backends: the same checks over processes, threads, MPI and GPUs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.collectives.collective_checks import (
    CHECKS,
    ENDS_OLD_GLOO,
    IS_OLD_TORCH,
    UNTAGGED,
    run_checks,
)
from support.processes.gpu_ranks import lacks_gpus, run_on_nccl
from support.processes.mpi_runs import MPIEXEC, run_under_mpiexec
from support.processes.worlds import run_on_gloo

import shoal


def under_mpi(world_size: int) -> Any:
    ended = run_under_mpiexec(world_size, "support.collectives.collective_checks.run_checks")
    assert ended.code == 0, ended.output
    return [ended.reports[rank]["returned"] for rank in range(world_size)]


def on_gpus(world_size: int) -> Any:
    return run_on_nccl(world_size, run_checks, "cuda")


LONG = {("mpi", 2), ("mpi", 4)}
RUNS: dict[str, Callable[[int], Any]] = {
    "gloo": lambda world_size: run_on_gloo(world_size, run_checks),
    "in-memory": lambda world_size: shoal.run_in_memory(run_checks, world_size),
    "mpi": under_mpi,
    "nccl": on_gpus,
}


# Ranks under MPI import torch each time, which is slow: one world size represents all.
WORLDS = [
    pytest.param(backend, size, marks=[pytest.mark.long] if (backend, size) in LONG else [])
    for backend in RUNS
    for size in (2, 3, 4)
]


@cache
def reports(backend: str, world_size: int) -> list[dict[str, str]]:
    """Reports of all ranks, by check. The ranks are started once for all checks."""
    found: list[dict[str, str]] = RUNS[backend](world_size)
    return found


def missing(backend: str, world_size: int, name: str) -> str:
    """Reason for which this backend cannot run the check; empty if it can."""
    if backend == "mpi" and not MPIEXEC.exists():
        return "mpi needs an mpiexec beside the interpreter: pip install mpich"
    if backend == "nccl":
        untagged = "nccl finds a message by its sender alone" if name in UNTAGGED else ""
        return lacks_gpus(world_size) or untagged
    if backend == "gloo" and name == ENDS_OLD_GLOO and IS_OLD_TORCH:
        return "torch's Gloo ends the process there before torch 2.11"
    return ""


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("backend", "world_size"), WORLDS)
def test_collectives(backend: str, world_size: int, name: str) -> None:
    """Names of the checks are in `collective_checks`: they say what must hold."""
    if lacks := missing(backend, world_size, name):
        pytest.skip(lacks)
    found = {rank: report[name] for rank, report in enumerate(reports(backend, world_size))}
    failed = {rank: trace for rank, trace in found.items() if trace}
    assert not failed, "\n".join(f"rank {rank}: {trace}" for rank, trace in failed.items())
