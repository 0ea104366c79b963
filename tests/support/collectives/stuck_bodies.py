"""Bodies of ranks that wait in collectives of a step or a bring-up that never end."""

import os
import signal
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.models.sharded_models import deep, lay_out, sgd, training_of
from support.processes.ranks import Report
from support.processes.worlds import LaidOutTraining
from support.training.rank_bodies import freed, lone_group

from shoal.backends.network import peer_connections
from shoal.backends.network.gloo import GlooBackend
from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.peers import GroupPeers
from shoal.layouts.base import LayOut, World
from shoal.layouts.tensor.derivation import derive
from shoal.layouts.tensor.layout import TensorLayout
from shoal.layouts.zero1 import Zero1Layout
from shoal.state.resharding import reshard
from shoal.state.shards import StateShard, TensorShard
from shoal.state.transfer import receive, send
from shoal.strategies.synchronous.generation_group import check_same_step


def _steps(way: LayOut) -> Callable[[dist.ProcessGroup], Callable[[], object]]:
    def prepared(group: dist.ProcessGroup) -> Callable[[], object]:
        rank, device = group.rank(), torch.device("cpu")
        world = World(rank=rank, world_size=2, device=device, group=group)
        training = LaidOutTraining(training_of(deep, sgd), way, world)
        for step in range(2):  # in its second step DDP reorders its buckets, with a collective
            training.step(step)
        return lambda: training.step(2)

    return prepared


def _transfer(group: dist.ProcessGroup) -> Callable[[], object]:
    state = StateShard(step=1, shards={"w": TensorShard.whole(torch.ones(1 << 24))})
    if group.rank() == 0:
        return lambda: send(state, [1], group)
    return lambda: receive(0, [1], group)


WAITS: dict[str, Callable[[dist.ProcessGroup], Callable[[], object]]] = {
    "fsdp": _steps(lay_out(min_group_bytes=150)),
    "tensor": _steps(lambda m, w: TensorLayout(m, w, derive(m, w.world_size, min_split_bytes=0))),
    "zero1": _steps(Zero1Layout),
    "state": lambda group: lambda: reshard(group, [], lambda *_: None),
    "transfer": _transfer,
    "agreement": lambda group: lambda: check_same_step(1, 1, group),
}


def stuck_in(report: Report, path: str, rank: int, what: str) -> None:
    """Stop rank 1 of two before the wait `what`, and abort rank 0's group without shutting a
    connection down: Gloo may hang like that."""
    os.environ["SHOAL_TRANSPORT"] = "tcp"
    group = lone_group(path, rank)
    process_group = group.open()
    go_on = WAITS[what](process_group)
    dist.barrier()
    if rank == 1:
        report("going")
        os.kill(os.getpid(), signal.SIGSTOP)
    thread = freed(group, process_group)
    try:
        go_on()
    except RuntimeError as error:
        report("freed", recognised=GlooBackend().is_failure(error))
    thread.join()
    group.retire()
    report("retired")


def stuck_checkpoint(report: Report, path: str, rank: int, directory: str) -> None:
    """Stop rank 1 of two before it writes its part. Rank 0's check of its peers sees the end of the
    connection, and Gloo does not."""
    group = lone_group(path, rank)
    group.open()
    peers = GroupPeers(dist.new_group())
    dist.barrier()
    if rank == 1:
        report("going")
        os.kill(os.getpid(), signal.SIGSTOP)
    peer_connections.STUCK_AFTER_S = 0.1
    peer_connections.count_connected = lambda announced: 0  # type: ignore[assignment]
    checkpoints = Checkpoints(directory, every_steps=1)
    state = {"model.w": TensorShard.whole(torch.ones(4))}
    checkpoints.begin_write(StateShard(step=1, shards=state, values={}), peers)
    # The order of a member that leaves.
    group.retire()
    checkpoints.finish_write()
    report("closed", written=checkpoints.written and checkpoints.written.step)
