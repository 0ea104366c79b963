"""Groups of a session's generations whose members are threads: opened, cut, retired."""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.backends.in_memory.seat import InMemoryBackend
from shoal.backends.process_group.interface import Group, Seat
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import GenerationBroken

WAIT_S = 30.0


class SharedStore(HashStore):
    """The store of one generation, within one process."""

    def abort(self, reason: str) -> None:
        self.reason = reason


def group_of(store: SharedStore, rank: int, world_size: int) -> Group:
    seat = Seat(
        generation=1,
        rank=rank,
        world_size=world_size,
        address="127.0.0.1",
        bring_up_s=60,
        collective_s=600,
    )
    return InMemoryBackend().group(seat, store)


def on_threads(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """Results of `body(rank)`, run on `world_size` threads. Raises the first error of any
    thread."""
    ends: list[Future[Any]] = [Future() for _ in range(world_size)]

    def run(rank: int) -> None:
        try:
            ends[rank].set_result(body(rank))
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            ends[rank].set_exception(error)

    for rank in range(world_size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    done, _ = wait(ends, timeout=100, return_when=FIRST_EXCEPTION)
    for end in done:
        end.result()
    return [end.result(timeout=0) for end in ends]


def test_a_thread_is_a_rank_of_one_generation_after_the_other() -> None:
    stores = [SharedStore() for _ in range(3)]

    def member(rank: int) -> list[float]:
        totals = []
        for number, store in enumerate(stores):
            group = group_of(store, rank, 3)
            group.open()
            tensor = torch.tensor([float(rank + number)])
            dist.all_reduce(tensor)
            totals.append(float(tensor))
            group.retire()
            assert not dist.is_initialized()
        return totals

    assert on_threads(3, member) == [[3.0, 6.0, 9.0]] * 3


def test_a_collective_under_way_raises_as_soon_as_its_group_is_cut() -> None:
    """The collective's limit is ten minutes away. The backend distinguishes this error from one of
    the user."""
    store, waiting = SharedStore(), threading.Event()

    def member(rank: int) -> BaseException | None:
        group = group_of(store, rank, 2)
        group.open()
        try:
            if rank == 0:
                work = dist.all_reduce(torch.zeros(1), async_op=True)
                waiting.set()
                with pytest.raises(dist.DistBackendError, match="is over") as caught:
                    work.wait()
                return caught.value
            waiting.wait(30)
            group.cut("generation 1 is over")
            return None
        finally:
            group.retire()

    error = on_threads(2, member)[0]
    assert InMemoryBackend().is_failure(error)
    assert not InMemoryBackend().is_failure(RuntimeError("mat1 and mat2 cannot be multiplied"))


def test_a_bring_up_that_waits_for_a_member_ends_as_soon_as_it_is_cut() -> None:
    store = SharedStore()
    groups = [group_of(store, rank, 3) for rank in range(2)]

    def member(rank: int) -> None:
        if rank == 2:
            store.wait(["in-memory"])
            for group in groups:
                group.cut("member 2 is lost")
            return
        with pytest.raises(GenerationBroken, match="member 2 is lost"):
            groups[rank].open()
        groups[rank].retire()
        assert not dist.is_initialized()

    on_threads(3, member)


def test_a_wait_for_a_member_that_has_retired_fails() -> None:
    store = SharedStore()

    def member(rank: int) -> None:
        group = group_of(store, rank, 2)
        group.open()
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="rank 1 ended without it"):
                dist.all_reduce(torch.zeros(1))
        group.retire()

    on_threads(2, member)


def test_a_member_in_another_process_gets_an_error_that_names_gloo() -> None:
    store = SharedStore()
    store.set("in-memory", "of another process")
    with pytest.raises(dist.DistBackendError, match='"gloo"'):
        group_of(store, 1, 2).open()


def test_a_thread_that_a_rank_started_can_use_its_groups() -> None:
    """Threads of a rank write checkpoints, for example. Collectives with a root need torch's tables
    of ranks."""

    def body() -> float:
        group = dist.new_group()
        tensor = torch.tensor([float(dist.get_rank())])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(dist.broadcast, tensor, 1, group).result()
        return float(tensor)

    assert shoal.run_in_memory(body, 3) == [1.0] * 3


@pytest.mark.long
def test_sessions_in_threads_train_together_under_a_real_coordinator(
    cluster: LocalCluster,
) -> None:
    """The weights are those of one process. A batch is the whole dataset, so the order of samples
    makes no difference."""
    inputs, targets = torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8.0).reshape(8, 1)

    def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def member(rank: int) -> torch.Tensor:
        with shoal.join(
            "threads",
            coordinator=cluster.coordinator,
            member_id=f"thread-{rank}",
            min_members=2,
            max_members=2,
            desired_members=2,
            backend="in-memory",
        ) as session:
            model, optimizer = model_and_optimizer()
            replica, _ = session.distribute(model, optimizer)
            for batch in session.batches((inputs, targets), global_batch_size=8, epochs=3):
                with session.step():
                    outputs, wanted = replica(batch.inputs), batch.targets
                    session.backward((outputs - wanted).square().mean())
        return model.weight.detach()

    model, optimizer = model_and_optimizer()
    for _ in range(3):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    for weight in on_threads(2, member):
        torch.testing.assert_close(weight, model.weight.detach(), rtol=0, atol=1e-6)


class Overtaken(nn.Linear):
    """A model of which rank 0 enters the forward pass first, and leaves it first."""

    def __init__(self, turns: dict[str, threading.Event]) -> None:
        super().__init__(2, 2)
        self.turns = turns

    def forward(self, given: Tensor) -> Tensor:
        if dist.get_rank():
            self.turns["entered"].set()
            assert self.turns["left"].wait(WAIT_S)
        else:
            assert self.turns["entered"].wait(WAIT_S)
        return super().forward(given)


def overtaken(turns: dict[str, threading.Event]) -> None:
    ddp = DistributedDataParallel(Overtaken(turns))
    if dist.get_rank():
        assert turns["first"].wait(WAIT_S)
    else:
        ddp.module.register_forward_pre_hook(lambda *_: turns["first"].set())
    ddp(torch.ones(1, 2))
    if not dist.get_rank():
        turns["left"].set()


def test_torch_has_no_active_forward_pass_once_all_ranks_have_ended() -> None:
    """Regression: torch split models compiled afterwards as for the DDP of an ended rank, or failed
    ("First bucket should be smaller")."""
    turns = {name: threading.Event() for name in ("first", "entered", "left")}
    shoal.run_in_memory(overtaken, 2, turns)
    assert DistributedDataParallel._get_active_ddp_module() is None
