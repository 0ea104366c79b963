"""`cpu_offload`: sharded parameters are in host memory, and training gives the same weights as on
one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import StepOptions, by_a_rank, by_one_process, difference
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.processes.ranks import Ranks
from support.training import equality
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.base import World
from shoal.model.local_parts import local_part, placed_like
from shoal.strategies.layout.fsdp import FSDP
from shoal.torch_private.fsdp import fsdp_parameters
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

OFFLOADED: dict[str, Callable[[], FSDP]] = {
    "fsdp": partial(shoal.FSDP, cpu_offload=True, min_group_bytes=200, copies=0),
    "zero2": partial(shoal.Zero2, cpu_offload=True, min_group_bytes=200, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, cpu_offload=True, min_group_bytes=200, copies=0),
}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", OFFLOADED)
def test_equal_to_one_process_with_clipping_and_accumulation(strategy: str) -> None:
    step_options = StepOptions(max_norm=0.1, passes=(1, 1, 1, 1, 2))
    run = equality.run_of("adamw", step_options=step_options)
    single = by_one_process(equality.run_of("adamw", step_options=StepOptions(max_norm=0.1)))
    for ours in run_in_memory(by_a_rank, 4, run, OFFLOADED[strategy]):
        assert difference(ours, single) < equality.TOLERANCE


def _offloaded_shards() -> list[tuple[bool, str, int]]:
    """Return for each parameter: True if FSDP offloads it; the device of its local shard; and world
    size x shard elements // all elements (1 if evenly sharded)."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, world_size=size, device=torch.device("cpu"), group=group)
    layout = shoal.FSDP(cpu_offload=True).lay_out(meta, world)
    loss = layout.module(torch.randn(2, 6)).sum()
    loss.backward()
    found = []
    for part, whole in zip(fsdp_parameters(layout.module), model.parameters(), strict=True):
        own = local_part(part.sharded_param)
        found.append((part.offload_to_cpu, own.device.type, own.numel() * size // whole.numel()))
        assert part.sharded_param.grad.to_local().device.type == "cpu"
    layout.release()
    return found


def test_torch_offloads_each_parameter() -> None:
    """Every parameter is marked for offload, on a CPU too. Memory is not pinned there: torch's
    default would pin, and fails without a GPU."""
    assert CPUOffloadPolicy().pin_memory
    for found in run_in_memory(_offloaded_shards, 2):
        assert found == [(True, "cpu", 1)] * 4


def _state_elsewhere() -> tuple[str, str, torch.dtype, torch.Size]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    # Without a GPU: the mesh's CPU stands for the GPU, and `meta` for the host.
    local = torch.empty(2, 3, dtype=torch.float64, device="meta")
    placed = placed_like(parameter, local)
    return placed.to_local().device.type, placed.device.type, placed.dtype, placed.shape


def test_optimizer_state_stays_on_its_device() -> None:
    for local, device, dtype, shape in run_in_memory(_state_elsewhere, 2):
        assert (local, device, dtype, shape) == ("meta", "meta", torch.float64, (4, 3))


@pytest.mark.long
def test_no_change_of_members_leaves_a_trace(cluster: LocalCluster, tmp_path: Path) -> None:
    options = {"cpu_offload": True, "min_group_bytes": 200}
    run = elastic(
        cluster, "offload", desired_members=3, strategy="fsdp", options=options, optimizer="adamw"
    )
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        check_no_trace(schedule, run, 1e-5)


def test_the_plan_says_that_parameters_are_in_host_memory() -> None:
    model = nn.Linear(6, 8)
    plan = shoal.plan(model, shoal.FSDP(cpu_offload=True), world_size=2)
    assert "in host memory" in str(plan)
    assert "in host memory" not in str(shoal.plan(model, "fsdp", world_size=2))


def test_cpu_offload_is_refused_under_fsdp_tensor() -> None:
    with pytest.raises(InvalidSpec, match=r"fsdp-tensor.*cpu_offload=True"):
        shoal.FSDPTensor(cpu_offload=True)


def test_cpu_offload_cannot_unscale_gradients() -> None:
    assert not shoal.FSDP(cpu_offload=True).unscales
    assert shoal.FSDP().unscales


def test_cpu_offload_is_in_the_options() -> None:
    assert shoal.FSDP(cpu_offload=True).options() != shoal.FSDP().options()
