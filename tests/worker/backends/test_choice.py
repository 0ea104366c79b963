"""Choice of a backend from the environment and the device, and errors if none fits."""

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from support.processes.ranks import Ranks, Report

import shoal
from shoal.backends.choice import backend_for, init_static_world, static_world
from shoal.backends.in_memory.seat import InMemoryBackend
from shoal.backends.network.gloo import GlooBackend
from shoal_proto.errors import InvalidSpec

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("environment", "name", "cuda", "expected"),
    [
        (TORCHRUN, None, False, ("gloo", 3, 4)),
        (TORCHRUN, None, True, ("nccl", 3, 4)),
        (TORCHRUN, "gloo", True, ("gloo", 3, 4)),
        (MPICH, None, False, ("mpi", 1, 2)),
        (OPEN_MPI, None, True, ("mpi", 5, 8)),
        (OPEN_MPI, "nccl", True, ("nccl", 5, 8)),
        (MPICH, "gloo", False, ("gloo", 1, 2)),
        # torchrun was itself started under MPI: torchrun's ranks count.
        ({**MPICH, **TORCHRUN}, None, False, ("gloo", 3, 4)),
    ],
)
def test_the_launcher_and_the_device_choose_the_backend(
    environment: Mapping[str, str], name: str | None, cuda: bool, expected: tuple[str, int, int]
) -> None:
    world = static_world(environment, name, cuda=cuda, mpi4py=True)
    assert (world.backend, world.rank, world.world_size) == expected
    assert world.local_rank == 1


@pytest.mark.parametrize(
    ("environment", "name", "says"),
    [
        ({}, None, "no rank"),
        ({"RANK": "0"}, None, "no rank"),
        (TORCHRUN, "smoke", "'smoke'.*'gloo' or 'nccl' or 'mpi'"),
        (TORCHRUN, "in-memory", "run_in_memory"),
        (TORCHRUN, "mpi", "mpiexec"),
        (TORCHRUN, "nccl", "no CUDA"),
        (MPICH, None, r"shoal\[mpi\]"),
    ],
)
def test_a_world_that_cannot_be_made_is_refused_with_the_reason(
    environment: Mapping[str, str], name: str | None, says: str
) -> None:
    with pytest.raises(InvalidSpec, match=says):
        static_world(environment, name, cuda=False, mpi4py=False)


def test_a_session_takes_the_named_backend_and_gloo_on_the_cpu_by_default() -> None:
    assert isinstance(backend_for("cpu"), GlooBackend)
    assert isinstance(backend_for("cuda", "gloo"), GlooBackend)
    assert isinstance(backend_for("cpu", "in-memory"), InMemoryBackend)


@pytest.mark.parametrize(
    ("device", "name", "says"),
    [("cpu", "smoke", "'smoke'"), ("cpu", "mpi", "fixed"), ("cpu", "nccl", "GPUs only")],
)
def test_a_session_refuses_a_backend_that_it_cannot_use(device: str, name: str, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        backend_for(device, name)


def test_a_session_on_cuda_takes_nccl_by_default() -> None:
    if torch.cuda.is_available():
        assert backend_for("cuda").name == "nccl"
    else:
        with pytest.raises(InvalidSpec, match="nccl cannot be used here"):
            backend_for("cuda")


def test_an_existing_world_is_kept_and_another_backend_refused() -> None:
    def body() -> int:
        init_static_world()
        init_static_world("in-memory")
        with pytest.raises(InvalidSpec, match="shoal_in_memory"):
            init_static_world("gloo")
        return dist.get_world_size()

    assert shoal.run_in_memory(body, 2) == [2, 2]


def from_torchruns_environment(report: Report) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
            environment.setenv(name, value)
        environment.delenv("MASTER_ADDR", raising=False)
        with pytest.raises(InvalidSpec, match="no MASTER_ADDR"):
            init_static_world("gloo")
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", "0")
        init_static_world("gloo")
        report("initialised", backend=dist.get_backend(), world_size=dist.get_world_size())
        dist.destroy_process_group()


@pytest.mark.long
def test_the_default_group_is_made_from_torchruns_environment() -> None:
    with Ranks() as ranks:
        rank = ranks.start(from_torchruns_environment)
        assert rank.expect("initialised") == {"backend": "gloo", "world_size": 1}
        assert rank.join() == 0
