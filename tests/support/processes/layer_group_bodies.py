"""Bodies of ranks for layouts/tensor/test_layer_group.py, which run in separate processes."""

import functools
import os
import threading

import torch
import torch.distributed as dist
from support.models import tensor_models as models
from support.processes.worlds import LaidOutTraining, Training, this_world
from torch import Tensor, nn

from shoal.layouts.base import Layout, World
from shoal.layouts.layer_exchanges import LayerExchanges
from shoal.layouts.tensor import layer_group
from shoal.layouts.tensor.derivation import derive
from shoal.layouts.tensor.layer_group import LayerGroup, TensorGroup
from shoal.layouts.tensor.layout import TensorLayout
from shoal.state.shards import StateShard
from shoal_client.connection.transport import TRANSPORT_VARIABLE
from shoal_proto.errors import GenerationBroken, InvalidSpec

TRAINING = Training(
    model=models.encoder_layer,
    optimizer=models.adamw,
    data=models.sequences,
    loss=models.squared,
    num_steps=4,
)


def split(model: nn.Module, world: World, *, sequence: bool = False) -> Layout:
    plan = derive(model, world.world_size, min_split_bytes=0, sequence=sequence)
    return TensorLayout(model, world, plan)


def opened(exchanges: LayerExchanges | None = None) -> TensorGroup:
    """Open a group of all ranks, which meet in memory if they can."""
    ranks = TensorGroup(this_world().group, torch.device("cpu"), exchanges)
    ranks.begin()
    assert not ranks.num_barriers
    ranks.begin()
    return ranks


def own(dtype: torch.dtype, number: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (100 * drawn).to(dtype) if dtype is torch.int64 else drawn.to(dtype)


def collectives(dtype: torch.dtype, place_bytes: int, rounds: int) -> tuple[bool, int]:
    """Return if each collective gives the same result as over Gloo, and the number of barriers."""
    layer_group.SLOT_BYTES = place_bytes
    in_memory, over_gloo = opened(), TensorGroup(this_world().group, torch.device("cpu"))
    layers = in_memory.of_layer("one"), over_gloo.of_layer("one")
    alike = True
    for number in range(rounds):
        # A tensor that is not contiguous.
        value = own(dtype, number, 4, 6).t()
        parts = own(dtype, number, dist.get_world_size(), 2, 3)
        alike &= _close(*(layer.all_reduce(value) for layer in layers))
        for one, other in zip(*(layer.all_gather(value) for layer in layers), strict=True):
            alike &= torch.equal(one, other)
        alike &= _close(*(layer.reduce_scatter(parts, backward=True) for layer in layers))
        taken = [[value.clone(), parts.clone()] for _ in range(2)]
        in_memory.broadcast(taken[0])
        over_gloo.broadcast(taken[1])
        alike &= all(map(torch.equal, *taken))
    num_barriers = in_memory.num_barriers
    in_memory.release()
    over_gloo.release()
    return alike, num_barriers


def _close(one: Tensor, other: Tensor) -> bool:
    inexact = one.is_floating_point() or one.is_complex()
    tolerance = 4 * torch.finfo(one.dtype).eps if inexact else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def trained(sequence: bool, transport: str = "auto") -> tuple[StateShard, int]:
    """Return the final state of a rank, and the number of its barriers in memory."""
    os.environ[TRANSPORT_VARIABLE] = transport
    layout = functools.partial(split, sequence=sequence)
    done = LaidOutTraining(TRAINING, layout, this_world())
    state = done.run()
    return state, done.layout.num_moved


def different_sizes() -> str:
    """Return the error after a pass in which the last rank had a smaller value than the first."""
    world = this_world()
    exchanges = LayerExchanges()
    exchanges.set_peers(range(world.world_size))
    ranks = opened(exchanges)
    layer = ranks.of_layer("one")
    exchanges.begin_step()
    layer.all_reduce(torch.ones(6 - world.rank))
    try:
        exchanges.check_outside_step(world.group)
    except InvalidSpec as error:
        return str(error)
    return ""


def cut_amid_a_collective() -> str:
    """Return the error of the first rank, which is cut while it waits for the others."""
    ranks = opened()
    layer = ranks.of_layer("one")
    layer.all_reduce(torch.ones(1))
    if dist.get_rank():
        return _ended(layer)
    threading.Timer(0.05, ranks.cut, ["the test is over"]).start()
    return _ended(layer)


def _ended(layer: LayerGroup) -> str:
    try:
        if not dist.get_rank():
            layer.all_reduce(torch.ones(1))
        layer.ranks.release()
        layer.all_reduce(torch.ones(1))
    except GenerationBroken as error:
        return str(error)
    return ""
