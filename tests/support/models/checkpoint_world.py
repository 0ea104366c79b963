"""States for checkpoints, ranks as threads, and bodies of the tests' processes."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from support.oracles.plain_torch import make, train
from support.processes.ranks import Report
from torch import nn

from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.peers import GroupPeers
from shoal.checkpoint.reading import read
from shoal.checkpoint.writing import write
from shoal.layouts.base import Layout
from shoal.layouts.optimizer_binding import MetaModel, OptimizerBinding
from shoal.model.tied_tensors import tied
from shoal.state.shards import MODEL, Chunk, StateShard, TensorShard, whole_chunk
from shoal_proto.errors import CheckpointFailed


class Whole(Layout):
    """Layout of a model in one process."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.module.named_parameters())


# Ranks that are threads share torch's random generator.
_making = threading.Lock()


def binding(optimizer_name: str, seed: int = 0) -> tuple[nn.Module, OptimizerBinding]:
    with _making:
        model, optimizer = make(optimizer_name, seed)
    return model, OptimizerBinding(MetaModel(model, optimizer), optimizer, Whole(model))


def trained(optimizer_name: str, steps: int = 3) -> StateShard:
    """Return the state after `steps` steps from the same start."""
    model, own = binding(optimizer_name)
    train(model, own.optimizer, range(steps))
    return collected(model, own, steps)


def collected(model: nn.Module, own: OptimizerBinding, step: int) -> StateShard:
    state_shard = own.collect(step).copied()
    values = {**state_shard.values, "tied": dict(tied(model))}
    return StateShard(step=step, shards=state_shard.shards, values=values)


def with_aliases(state_shard: StateShard) -> StateShard:
    """Add the aliases of tied parameters, as in a whole checkpoint that was read."""
    aliases = {
        MODEL + alias: state_shard.shards[MODEL + name]
        for alias, name in state_shard.values["tied"].items()  # type: ignore[union-attr]
    }
    return StateShard(
        step=state_shard.step, shards={**state_shard.shards, **aliases}, values=state_shard.values
    )


def cut_box(shape: Sequence[int], dim: int, rank: int, world_size: int) -> Chunk:
    """Return this rank's part of a tensor that is cut along `dim`, or its last dimension if it has
    fewer, as evenly as possible. A scalar is whole on all ranks."""
    whole = Chunk.whole(tuple(shape))
    if not shape:
        return whole
    dim = min(dim, len(shape) - 1)
    start, stop = (shape[dim] * r // world_size for r in (rank, rank + 1))
    offsets, sizes = list(whole.offsets), list(whole.sizes)
    offsets[dim], sizes[dim] = start, stop - start
    return Chunk(offsets=tuple(offsets), sizes=tuple(sizes))


def cut(whole: StateShard, dim: int, rank: int, world_size: int) -> StateShard:
    """Return the part of one rank in a layout by rows (0) or columns (1)."""
    shards = {}
    for name, shard in whole.shards.items():
        chunk = cut_box(shard.shape, dim, rank, world_size)
        if chunk.num_elements:
            part = shard.tensor[chunk.slices_in(shard.chunk)]
            shards[name] = TensorShard(shape=shard.shape, chunk=chunk, tensor=part)
    return StateShard(step=whole.step, shards=shards, values=whole.values)


def needs_cut(dim: int, rank: int, world_size: int) -> Callable[..., Chunk | None]:
    def needs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
        chunk = cut_box(shape, dim, rank, world_size)
        return chunk if chunk.num_elements else None

    return needs


def differences(one: StateShard, other: StateShard) -> list[str]:
    """Return the names of tensors and fields that differ, compared bit for bit."""
    found = sorted(set(one.shards) ^ set(other.shards))
    for name in set(one.shards) & set(other.shards):
        a, b = one.shards[name], other.shards[name]
        same = (a.shape, a.chunk, a.tensor.dtype) == (b.shape, b.chunk, b.tensor.dtype)
        if not same or not torch.equal(a.tensor, b.tensor):
            found.append(name)
    return found + [key for key in ("step", "values") if getattr(one, key) != getattr(other, key)]


def names_in(directory: str | Path) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


class Table:
    """Ranks as threads of this process, which exchange messages."""

    def __init__(self, world_size: int) -> None:
        self._said: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self.peers = [TablePeers(self, rank) for rank in range(world_size)]

    def gather(self, rank: int, message: bytes) -> list[bytes]:
        self._said[rank] = message
        self._barrier.wait()
        messages = list(self._said)
        self._barrier.wait()
        return messages

    def lose(self) -> None:
        """Lose a rank: all waits for it, now or later, raise an error."""
        self._barrier.abort()


class TablePeers:
    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self.rank = rank

    def gather(self, message: bytes) -> list[bytes]:
        return self._table.gather(self.rank, message)


def on_all(world_size: int, act: Callable[[TablePeers], object]) -> list[BaseException | None]:
    """Run `act` on all ranks at once; return the exception of each."""
    table = Table(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(act, peers) for peers in table.peers]
    return [future.exception() for future in futures]


def write_on_all(path: Path, state_shards: Sequence[StateShard]) -> list[BaseException | None]:
    return on_all(len(state_shards), lambda peers: write(path, state_shards[peers.rank], peers))


# --- bodies of processes ---


def write_in_group(directory: str, steps: int) -> str:
    """Write a checkpoint of this rank's rows together with the group; return the checkpoint's
    name."""
    peers = GroupPeers(dist.new_group())
    state_shard = cut(trained("adamw", steps), 0, peers.rank, dist.get_world_size())
    with Checkpoints(directory, every_steps=1) as checkpoints:
        checkpoints.begin_write(state_shard, peers)
    newest = checkpoints.newest()
    assert newest is not None
    return newest.name


class MortalPeers(GroupPeers):
    """Peers of which the last rank dies before it reports that its share is written."""

    num_gathered = 0

    def gather(self, message: bytes) -> list[bytes]:
        self.num_gathered += 1
        if self.rank == dist.get_world_size() - 1 and self.num_gathered == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().gather(message)


def write_with_a_loss(report: Report, store: str, directory: str, rank: int, size: int) -> None:
    """Write a checkpoint during which the last rank of the group is killed."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    group = dist.new_group()
    state_shard = cut(trained("sgd"), 0, rank, size)
    checkpoints = Checkpoints(directory, every_steps=1)
    checkpoints.begin_write(state_shard, MortalPeers(group))
    checkpoints.finish_write()
    report("closed")


# Audit events that Python raises before the system calls.
_TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def die_at_each_call(report: Report, directory: str, keep: int, old: int, new: int) -> None:
    """Write a checkpoint of step `new` beside one of `old` in a process that is killed before its
    first call that touches the directory; then again, killed before its second call, and so on
    until a process survives. Report what can be read after each death."""
    first, second = (
        StateShard(step=step, shards={"model.a": TensorShard.whole(torch.full((3, 2), value))})
        for step, value in ((old, 1.0), (new, 2.0))
    )
    for calls_to_live in range(200):
        place = Path(directory) / str(calls_to_live)
        _offer(place, keep, first)
        status = _in_mortal_process(place, calls_to_live, partial(_offer, place, keep, second))
        newest = Checkpoints(place, every_steps=1).newest()
        assert newest is not None, f"nothing is left after {calls_to_live} calls"
        found = read(newest, whole_chunk)
        whole = [
            label
            for label, state in (("old", first), ("new", second))
            if not differences(found, state)
        ]
        _offer(place, keep, second)
        report("died", status=status, whole=whole, left=names_in(place))
        if status == 0:
            return


def _offer(place: Path, keep: int, state_shard: StateShard) -> None:
    with Checkpoints(place, every_steps=1, keep=keep) as checkpoints:
        checkpoints.begin_write(state_shard)


def _in_mortal_process(place: Path, calls_to_live: int, act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = [calls_to_live]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event in _TOUCHES and any(str(place) in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    act()
    os._exit(0)


def write_where_files_cannot_grow(report: Report, directory: str) -> None:
    """Write checkpoints, the third of which exceeds a limit on the size of files."""
    model, own = binding("adamw")
    checkpoints = Checkpoints(directory, every_steps=1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(4):
        limit = 4096 if step == 2 else hard
        train(model, own.optimizer, range(step, step + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        checkpoints.begin_write(collected(model, own, step + 1))
        try:
            checkpoints.finish_write()
        except CheckpointFailed as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            report("failed", step=step + 1, text=str(error), details=error.details)
    report("done", newest=str(checkpoints.newest()), left=names_in(directory))
