"""Choice of the backend: for a session, or for ranks that torchrun or mpiexec started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist

from shoal.backends.process_group.interface import Backend
from shoal_proto.errors import InvalidSpec

ELASTIC = ("gloo", "nccl", "in-memory")
STATIC = ("gloo", "nccl", "mpi")
_NAME_IN_TORCH = {"in-memory": "shoal_in_memory", "mpi": "shoal_mpi"}
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def backend_for(device_type: str, name: str | None = None) -> Backend:
    """Return the backend of a session whose model is on this kind of device ("cpu", "cuda").

    `name`: "gloo", "nccl" or "in-memory"; the default is NCCL for CUDA and Gloo for all else.
    Raises InvalidSpec for an unknown name or a missing requirement.
    """
    name = name or ("nccl" if device_type == "cuda" else "gloo")
    if name not in ELASTIC:
        raise _unknown(name, ELASTIC, "An MPI world is fixed." if name == "mpi" else "")
    if name == "nccl" and device_type != "cuda":
        raise InvalidSpec(
            "the backend nccl moves memory of GPUs only",
            seen=f"a model on {device_type}",
            expected="a model on cuda",
        )
    return _make(name)


def _make(name: str) -> Backend:
    # A backend registers itself with torch, and may need packages that are not installed.
    if name == "nccl":
        from shoal.backends.network.nccl import NcclBackend  # noqa: PLC0415

        return NcclBackend()
    if name == "in-memory":
        from shoal.backends.in_memory.seat import InMemoryBackend  # noqa: PLC0415

        return InMemoryBackend()
    from shoal.backends.network.gloo import GlooBackend  # noqa: PLC0415

    return GlooBackend()


@dataclass(frozen=True, kw_only=True)
class StaticWorld:
    """A fixed world as a launcher's environment describes it."""

    backend: str
    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this host: selects this rank's GPU."""


def static_world(
    environment: Mapping[str, str], name: str | None, *, cuda: bool, mpi4py: bool
) -> StaticWorld:
    """Read rank and world size from torchrun's or mpiexec's environment, and choose a backend.
    Raises InvalidSpec for an unknown or unavailable backend, and if no launcher gave a rank."""
    if name is not None and name not in STATIC:
        fix = "Use shoal.run_in_memory(body, world_size)." if name == "in-memory" else ""
        raise _unknown(name, STATIC, fix)
    mpi_variables = next((pair for pair in _MPI_VARIABLES if pair[0] in environment), None)
    has_torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    if not has_torchrun and mpi_variables is None:
        raise InvalidSpec(
            "this process has no rank",
            seen="neither RANK and WORLD_SIZE nor the variables of an MPI launcher",
            fix="Start it with `torchrun --nproc-per-node N train.py` or `mpiexec -n N ...`.",
        )
    if name == "mpi" and mpi_variables is None:
        raise InvalidSpec(
            "the backend mpi needs ranks that MPI started",
            seen="torchrun",
            fix="Start it with `mpiexec -n N python train.py`.",
        )
    chosen = name or ("nccl" if cuda else "gloo")
    if name is None and not has_torchrun:
        chosen = "mpi"
    _check_present(chosen, cuda=cuda, mpi4py=mpi4py)
    rank, size = (
        mpi_variables if mpi_variables is not None and not has_torchrun else ("RANK", "WORLD_SIZE")
    )
    local = [environment[key] for key in ("LOCAL_RANK", "MPI_LOCALRANKID") if key in environment]
    local.append(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    return StaticWorld(
        backend=chosen,
        rank=int(environment[rank]),
        world_size=int(environment[size]),
        local_rank=int(local[0]),
    )


def _check_present(name: str, *, cuda: bool, mpi4py: bool) -> None:
    if name == "nccl" and not cuda:
        raise InvalidSpec(
            "the backend nccl cannot be used here", seen="no CUDA device", fix='Use "gloo".'
        )
    if name == "mpi" and not mpi4py:
        raise InvalidSpec(
            "the backend mpi cannot be used here",
            seen="no mpi4py",
            fix="pip install 'shoal[mpi]', with the MPI that starts the ranks.",
        )


def init_static_world(backend: str | None = None) -> None:
    """Initialise torch.distributed's default group with the ranks of torchrun or mpiexec.

    `backend`: "gloo", "nccl" or "mpi"; the default is "mpi" under mpiexec (unless RANK and
    WORLD_SIZE are set), else "nccl" with CUDA and "gloo" without. Does nothing if the group exists
    already. Raises InvalidSpec if it exists with another backend, for "gloo" and "nccl" without
    MASTER_ADDR or MASTER_PORT, and what `static_world` raises.
    """
    if dist.is_initialized():
        present = dist.get_backend()
        if backend is not None and _NAME_IN_TORCH.get(backend, backend) != present:
            raise InvalidSpec(
                "torch.distributed has a default process group of another backend already",
                seen=present,
                expected=backend,
            )
        return
    cuda, mpi4py = torch.cuda.is_available(), find_spec("mpi4py") is not None
    world = static_world(os.environ, backend, cuda=cuda, mpi4py=mpi4py)
    if world.backend == "mpi":
        from shoal.backends.mpi.group import init_mpi  # noqa: PLC0415 - mpi4py is not everywhere

        init_mpi()
        return
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        if variable not in os.environ:
            raise InvalidSpec(
                f"ranks cannot find each other over {world.backend}",
                seen=f"no {variable} in the environment",
                fix=f"Set {variable}, or start the ranks with torchrun.",
            )
    if world.backend == "nccl":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    dist.init_process_group(world.backend, rank=world.rank, world_size=world.world_size)


def _unknown(name: str, known: tuple[str, ...], fix: str) -> InvalidSpec:
    return InvalidSpec(
        "no such backend here", seen=repr(name), expected=" or ".join(map(repr, known)), fix=fix
    )
