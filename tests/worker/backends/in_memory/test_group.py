"""Ranks as threads: torch's own components work over them, and separate runs share nothing."""

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.collective_checks import IS_OLD_TORCH
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.backends.in_memory.hub import MAX_UNDELIVERED
from shoal.backends.process_group.collectives import counts, reset_counts
from shoal.torch_private.c10d import all_gather_single, reduce_scatter_single
from shoal_proto.errors import DeadlineExceeded, InvalidSpec

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
INPUTS, TARGETS = torch.randn(12, 5), torch.randn(12, 3)
NUM_STEPS = 4


def steps(module: nn.Module, parameters: Any, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Train `module` for a few steps; return the full parameters."""
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]


def alone() -> list[Tensor]:
    model = copy.deepcopy(MODEL)
    return steps(model, model.parameters(), INPUTS, TARGETS)


def own_samples() -> tuple[Tensor, Tensor]:
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return INPUTS[own], TARGETS[own]


def in_two_rounds(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in two reductions of half the mean each. The callback of the first starts
    the second, as PowerSGD's hook does."""
    whole = bucket.buffer()
    half = whole.clone().div_(2 * dist.get_world_size())

    def second(first: Any) -> Tensor:
        again = whole.div_(2 * dist.get_world_size())
        dist.all_reduce(again)
        return again.add_(first.value()[0])

    return dist.all_reduce(half, async_op=True).get_future().then(second)


def data_parallel(hook: Callable[..., Any] | None = None) -> list[Tensor]:
    model = copy.deepcopy(MODEL)
    ddp = DistributedDataParallel(model)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return steps(ddp, model.parameters(), *own_samples())


def sharded(*, reshard: bool) -> list[Tensor]:
    model = copy.deepcopy(MODEL)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return steps(model, model.parameters(), *own_samples())


def tensor_parallel() -> list[Tensor]:
    """Train over one dimension of a mesh with two; ranks that differ only in the other dimension
    have the same samples."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tp"))
    model = copy.deepcopy(MODEL)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return steps(model, model.parameters(), INPUTS, TARGETS)


def piped(schedule: Any) -> list[Tensor]:
    """Train a pipeline of two ranks: the model's first layers are on rank 0. Interleaved: two
    stages per rank."""
    model = copy.deepcopy(MODEL)
    rank, layers = dist.get_rank(), list(model)
    cuts = [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    looped = schedule is ScheduleInterleaved1F1B
    cuts = cuts if looped else [slice(0, 2), slice(2, 5)]
    parts = {i: nn.Sequential(*layers[cut]) for i, cut in enumerate(cuts) if i % 2 == rank}
    stages = [PipelineStage(part, i, len(cuts), torch.device("cpu")) for i, part in parts.items()]
    runner = schedule(
        stages if looped else stages[0],
        4,
        loss_fn=lambda outputs, targets: (outputs - targets).square().mean(),
    )
    parameters = [p for part in parts.values() for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        given = (INPUTS,) if rank == 0 else ()
        runner.step(*given, target=TARGETS if rank == 1 else None)
        optimizer.step()
    whole = []
    for i, cut in enumerate(cuts):
        for parameter in nn.Sequential(*layers[cut]).parameters():
            dist.broadcast(parameter.data, src=i % 2)
            whole.append(parameter.detach())
    return whole


def assert_same(ours: list[list[Tensor]], tolerance: float = 1e-6) -> None:
    for rank in ours:
        for mine, expected in zip(rank, alone(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ddp_trains_as_one_process_does(world_size: int) -> None:
    assert_same(shoal.run_in_memory(data_parallel, world_size))


@pytest.mark.parametrize(("hook", "tolerance"), [(fp16_compress_hook, 1e-3), (in_two_rounds, 1e-6)])
def test_a_hook_of_ddp_communicates_on_its_own_rank(
    hook: Callable[..., Any], tolerance: float
) -> None:
    """The callback of a reduction communicates too. It must not run on the rank that completed the
    reduction."""
    assert_same(shoal.run_in_memory(data_parallel, 3, hook), tolerance)


@pytest.mark.sampled()
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_fully_shard_trains_as_one_process_does(world_size: int, *, reshard: bool) -> None:
    assert_same(shoal.run_in_memory(lambda: sharded(reshard=reshard), world_size))


@pytest.mark.long
def test_tensor_parallel_over_a_part_of_a_mesh_trains_as_one_process_does() -> None:
    assert_same(shoal.run_in_memory(tensor_parallel, 4))


@pytest.mark.skipif(
    IS_OLD_TORCH,
    reason="torch 2.9 begins a pipeline by sending 8 bytes to 4, which this backend refuses",
)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_pipeline_trains_as_one_process_does(schedule: Any) -> None:
    assert_same(shoal.run_in_memory(piped, 2, schedule))


def test_several_jobs_run_at_once_and_one_within_another() -> None:
    """Sizes and results differ. No thread and no state of torch is left when the jobs are done."""
    before = (dist.distributed_c10d._world, sys.excepthook)
    threads = set(threading.enumerate())
    found: dict[int, list[int]] = {}

    def total(value: int) -> int:
        tensor = torch.tensor([value])
        for _ in range(20):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        dist.all_reduce(tensor)
        return int(tensor)

    def outer(world_size: int) -> None:
        def inner() -> int:
            rank = dist.get_rank()
            nested = shoal.run_in_memory(total, 2, 10 + rank)
            assert nested == [20 + 2 * rank] * 2
            assert dist.get_rank() == rank
            return total(world_size)

        found[world_size] = shoal.run_in_memory(inner, world_size)

    jobs = [threading.Thread(target=outer, args=(size,)) for size in (2, 3, 4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert found == {size: [size * size] * size for size in (2, 3, 4)}
    assert not dist.is_initialized()
    assert (dist.distributed_c10d._world, sys.excepthook) == before
    # A thread of an earlier test may end meanwhile.
    assert not set(threading.enumerate()) - threads


def test_the_error_of_a_rank_is_raised_with_its_rank_and_releases_the_others() -> None:
    released: dict[int, str] = {}

    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        if rank == 2:
            raise KeyError("lost")
        try:
            dist.barrier(group) if rank == 1 else dist.recv(torch.zeros(1), 2)
            dist.barrier()
        except dist.DistBackendError as error:
            released[rank] = str(error)
            raise

    with pytest.raises(KeyError, match="lost") as caught:
        shoal.run_in_memory(body, 3)
    assert caught.value.__notes__ == ["raised on rank 2 of 3"]
    assert set(released) == {0, 1}
    assert all("rank 2 raised KeyError" in text for text in released.values())


def test_a_rank_that_raises_in_backward_fails_the_others_in_their_reduction() -> None:
    """The other ranks receive the failure inside torch's reducer, as an error of
    torch.distributed."""
    kinds: dict[int, type] = {}

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            raise ArithmeticError("no gradient")

    def body() -> None:
        ddp = DistributedDataParallel(copy.deepcopy(MODEL))
        loss = ddp(own_samples()[0]).mean()
        if dist.get_rank() == 1:
            loss = Broken.apply(loss)
        try:
            loss.backward()
        except Exception as error:
            kinds[dist.get_rank()] = type(error)
            raise

    with pytest.raises(ArithmeticError, match="no gradient"):
        shoal.run_in_memory(body, 3)
    assert kinds[1] is ArithmeticError
    assert issubclass(kinds[0], dist.DistError)
    assert issubclass(kinds[2], dist.DistError)


def test_a_wait_for_a_rank_that_has_ended_fails_at_once() -> None:
    def body() -> None:
        if dist.get_rank() != 1:
            dist.barrier()

    with pytest.raises(dist.DistBackendError, match="rank 1 ended without it"):
        shoal.run_in_memory(body, 3, timeout_s=600)


def test_a_wait_for_a_rank_that_does_something_else_ends_at_its_deadline() -> None:
    """Rank 0, which waits, fails, and so does rank 1, which comes after the deadline."""
    over = threading.Event()
    late: list[BaseException] = []

    def body() -> None:
        if dist.get_rank() == 0:
            try:
                dist.all_reduce(torch.zeros(2))
            finally:
                over.set()
        over.wait(30)
        try:
            dist.all_reduce(torch.zeros(2))
        except dist.DistBackendError as error:
            late.append(error)
            raise

    with pytest.raises(dist.DistBackendError, match=r"within 0\.05 s: rank 1 did not take part"):
        shoal.run_in_memory(body, 2, timeout_s=0.05)
    assert len(late) == 1


def test_a_rank_that_does_not_end_is_named() -> None:
    go_on = threading.Event()

    def body() -> None:
        if dist.get_rank() == 0:
            raise ValueError("first")
        go_on.wait(30)

    with pytest.raises(DeadlineExceeded, match="rank 1 did not end") as caught:
        shoal.run_in_memory(body, 2, timeout_s=0.1)
    assert str(caught.value.__cause__) == "first"
    go_on.set()


def test_ranks_in_different_collectives_get_an_error_that_names_both() -> None:
    """The collectives of two ranks are compared before values are combined: a sum must not include
    values of another collective."""

    def body() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), 0)

    with pytest.raises(dist.DistBackendError, match=r"rank 0: all_reduce.*rank 1: broadcast"):
        shoal.run_in_memory(body, 2)


def test_ranks_with_tensors_of_different_sizes_get_an_error() -> None:
    with pytest.raises(dist.DistBackendError, match=r"\(2,\).*\(3,\)"):
        shoal.run_in_memory(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), 2)


def test_a_message_of_another_size_is_refused() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(3), 0)

    with pytest.raises(dist.DistBackendError, match=r"\(2,\).*was sent.*\(3,\).*received"):
        shoal.run_in_memory(body, 2)


def test_a_sender_with_too_many_undelivered_messages_waits() -> None:
    """The number of messages sent and not yet received is bounded; here rank 1 ends without
    receiving any."""

    def body() -> None:
        if dist.get_rank() == 0:
            for _ in range(MAX_UNDELIVERED + 1):
                dist.send(torch.ones(1), 1)

    with pytest.raises(dist.DistBackendError, match="send to rank 1"):
        shoal.run_in_memory(body, 2)


def test_a_sum_does_not_depend_on_the_order_in_which_ranks_arrive() -> None:
    """The sum of these three values depends on the order of the additions."""
    values = [1e8, 1.0, -1e8]
    turns = {order: [threading.Event() for _ in range(4)] for order in ("012", "201", "120")}

    def body(order: str) -> float:
        place = order.index(str(dist.get_rank()))
        turn = turns[order]
        if place:
            turn[place].wait(30)
        tensor = torch.tensor([values[dist.get_rank()]])
        work = dist.all_reduce(tensor, async_op=True)
        turn[place + 1].set()
        work.wait()
        return float(tensor)

    sums = {total for order in turns for total in shoal.run_in_memory(body, 3, order)}
    assert len(sums) == 1


def test_calls_and_bytes_are_counted_by_group_and_operation() -> None:
    def body() -> list[Any]:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(10))
        all_gather_single(torch.empty(6), torch.ones(3))
        reduce_scatter_single(torch.empty(2, dtype=torch.float16), torch.ones(4).half())
        dist.broadcast(torch.ones(3, dtype=torch.int64), 0, group=pair)
        dist.barrier()
        seen = [counts(pair), counts(dist.group.WORLD), counts()]
        reset_counts(pair)
        return [*seen, counts(pair)]

    for pair, world, both, after in shoal.run_in_memory(body, 2):
        assert pair == {"broadcast": (1, 24)}
        assert world == {
            "all_reduce": (1, 40),
            "all_gather": (1, 24),
            "reduce_scatter": (1, 8),
            "barrier": (1, 0),
        }
        assert both == {**world, **pair}
        assert after == {}


def test_an_asynchronous_operation_is_complete_after_its_wait() -> None:
    """Holds too if ranks wait for the operations of different groups in different orders."""

    def body() -> list[float]:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        tensors = [torch.full((2,), float(rank + 1)), torch.full((2,), float(10 * rank + 10))]
        order = (0, 1) if rank == 0 else (1, 0)
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
        for work in works.values():
            work.wait()
            assert work.is_completed()
        value = works[0].get_future().wait()[0]
        assert value.tolist() == tensors[0].tolist()
        return [float(tensor[0]) for tensor in tensors]

    assert shoal.run_in_memory(body, 2) == [[3.0, 30.0]] * 2


@pytest.mark.parametrize(("world_size", "timeout_s"), [(0, 60.0), (2, 0.0)])
def test_an_invalid_world_size_or_timeout_is_refused(world_size: int, timeout_s: float) -> None:
    with pytest.raises(InvalidSpec):
        shoal.run_in_memory(dist.get_rank, world_size, timeout_s=timeout_s)


def test_meshes_of_different_ranks_and_runs_are_unequal() -> None:
    """torch caches what it computed for a mesh, such as the sizes of uneven parts. With equal
    meshes, one rank would read what another rank had computed."""
    whole = torch.arange(7.0 * 5).reshape(7, 5)

    def body() -> DeviceMesh:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        by_rows = distribute_tensor(whole, mesh, [Shard(0)])
        for layout in (Shard(1), Replicate(), Shard(0)):
            moved = by_rows.redistribute(mesh, [layout])
            assert torch.equal((moved * 2).full_tensor(), whole * 2)
        return mesh

    meshes = [mesh for _ in range(5) for mesh in shoal.run_in_memory(body, 3)]
    assert len(set(meshes)) == 15
    if not IS_OLD_TORCH:  # a mesh without a world
        plain = [DeviceMesh("cpu", [0], _init_backend=False, _rank=0) for _ in range(2)]
        assert plain[0] == plain[1]
