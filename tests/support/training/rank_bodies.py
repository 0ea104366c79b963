"""Bodies of member processes in tests: a module that these processes can import."""

import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Report
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.backends.abortable.waiter import waiters_of
from shoal.backends.network import retired
from shoal.backends.network.gloo import GlooBackend, GlooGroup
from shoal.backends.process_group.interface import Seat
from shoal.compression.gradient_exchange import GradientExchange
from shoal.layouts.pipeline.relay import Neighbours
from shoal.membership.generation import Generation
from shoal.membership.join_config import JoinConfig
from shoal.session.session import Session
from shoal.state.shards import StateShard, TensorShard
from shoal.state.transfer import receive, send
from shoal.strategies.base import Strategy
from shoal.strategies.layout.ddp import DDP
from shoal_client.membership.member import Member
from shoal_proto.errors import GenerationBroken


class AbortableFileStore(dist.FileStore):
    """A file as the store of a group. All peers connect, so no wait in it is long."""

    def abort(self, reason: str) -> None:
        self.reason = reason


class MortalStore(AbortableFileStore):
    """Store of a process that dies right after it published its address: its peers then wait for
    its connection."""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGKILL)


class LateStore(AbortableFileStore):
    """Store that returns a peer's address only once the test has seen that peer die."""

    def __init__(self, path: str, world_size: int, gate: str) -> None:
        super().__init__(path, world_size)
        self._gate = gate
        self.passed = threading.Event()

    def get(self, key: str) -> bytes:
        value: bytes = super().get(key)
        if not self.passed.is_set():
            Path(self._gate).read_bytes()  # a named pipe: returns when the test has opened it too
            self.passed.set()
        return value


def _group(
    path: str,
    rank: int,
    world_size: int,
    generation: int = 1,
    *,
    store: Any = None,
    collective_s: float = 60,
    backend: GlooBackend | None = None,
) -> GlooGroup:
    seat = Seat(
        generation=generation,
        rank=rank,
        world_size=world_size,
        address="127.0.0.1",
        bring_up_s=60,
        collective_s=collective_s,
    )
    return (backend or GlooBackend()).group(
        seat, store or AbortableFileStore(f"{path}.{generation}", world_size)
    )


def stuck_collective(report: Report, path: str, rank: int, world_size: int, how: str) -> None:
    """Stop or kill the last rank; the others hang in an all-reduce until their group is cut."""
    bystander, caller, accepted = _bystander()
    group = _group(path, rank, world_size)
    group.open()
    dist.all_reduce(torch.ones(1))
    if rank == world_size - 1:
        report("going", pid=os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    blocked = threading.Event()
    cutter = threading.Thread(target=lambda: (blocked.wait(30), group.cut("test")))
    cutter.start()
    started_s = time.perf_counter()
    try:
        blocked.set()
        dist.all_reduce(torch.ones(1 << 20))
    except RuntimeError as error:
        assert GlooBackend().is_failure(error), error
        report("cut", seconds=time.perf_counter() - started_s)
    cutter.join()
    caller.sendall(b"still here")
    report("bystander", received=accepted.recv(100))
    for each in (bystander, caller, accepted):
        each.close()
    group.retire()


class CountingStore(AbortableFileStore):
    """Store that counts the waits, which would go over the network."""

    num_waits = 0

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self.num_waits += 1
        super().wait(keys)


def counted_bring_up(report: Report, path: str, rank: int, world_size: int) -> None:
    """Bring one group up, and report its number of waits for the store."""
    store = CountingStore(path, world_size)
    group = _group(path, rank, world_size, store=store)
    group.open()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    report("up", num_waits=store.num_waits, total=float(ones))
    group.retire()


def _bystander() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Open a connection within the process that does not belong to the group."""
    listener = socket.create_server(("127.0.0.1", 0))
    caller = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    return listener, caller, accepted


def timed_out_collective(report: Report, path: str, rank: int) -> None:
    """Stop rank 1 of two without a cut: rank 0 runs into the time limit of a collective."""
    group = _group(path, rank, 2, collective_s=1)
    group.open()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        report("going")
        os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(2):  # the first error names the timeout, the second the group's failure
        try:
            dist.all_reduce(torch.ones(1 << 20))
        except RuntimeError as error:
            report("failed", recognised=GlooBackend().is_failure(error), text=str(error))
    group.cut("test")
    group.retire()


def stuck_bring_up(report: Report, path: str, rank: int, dead: int, gate: str) -> None:
    """Kill rank `dead` of two after it published its address; the other is cut while it
    connects."""
    store_path = f"{path}.bring-up"
    if rank == dead:
        _group(path, rank, 2, store=MortalStore(store_path, 2)).open()
    store = LateStore(store_path, 2, gate)
    group = _group(path, rank, 2, store=store)
    cutter = threading.Thread(target=lambda: (store.passed.wait(30), group.cut("test")))
    cutter.start()
    try:
        group.open()
    except GenerationBroken:
        report("over")
    except RuntimeError as error:
        # A connection to a port without a listener may fail before the cut. Which of the two ranks
        # connects depends on their addresses.
        assert GlooBackend().is_failure(error), error
        report("over")
    cutter.join()
    group.retire()


def lone_group(path: str, rank: int) -> GlooGroup:
    """Make the group of one of two ranks, which nothing cuts."""
    return _group(path, rank, 2)


def freed(group: GlooGroup, process_group: dist.ProcessGroup) -> threading.Thread:
    """Start a thread that aborts the trainer's wait once there is one; return the thread."""

    def free() -> None:
        while not any(waiters.pending() for waiters in waiters_of(process_group)):
            time.sleep(0.01)
        group.keep_for_ever()
        for waiters in waiters_of(process_group):
            waiters.abort("test")

    thread = threading.Thread(target=free)
    thread.start()
    return thread


def stuck_for_good(report: Report, path: str, rank: int) -> None:
    """Stop rank 1 of two, and abort rank 0's group without shutting a connection down: Gloo may
    hang like that."""
    group = _group(path, rank, 2)
    process_group = group.open()
    model = torch.nn.Linear(4, 4)
    ddp = DistributedDataParallel(model, process_group=process_group, init_sync=False)
    exchange = GradientExchange(process_group, lambda _: "w")
    ddp.register_comm_hook(None, exchange.average)
    for _ in range(2):  # in its second step DDP reorders its buckets, with a collective
        ddp(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        report("going")
        os.kill(os.getpid(), signal.SIGSTOP)
    exchange.begin(0)
    thread = freed(group, process_group)
    try:
        ddp(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        recognised = GlooBackend().is_failure(error)
        error.__traceback__ = None
        report("freed", recognised=recognised)
    thread.join()
    del ddp.logger, ddp.reducer
    group.retire()
    report("retired")


def stuck_message(report: Report, path: str, rank: int, way: str) -> None:
    """Stop rank 1 of two during a message; rank 0's group is aborted as in `stuck_for_good`."""
    group = _group(path, rank, 2)
    process_group = group.open()
    near = Neighbours(process_group, torch.device("cpu"))
    near.p2p.broadcast(torch.ones(1), 0)
    if rank == 1:
        report("going")
        os.kill(os.getpid(), signal.SIGSTOP)
    thread = freed(group, process_group)
    try:
        if way == "send":  # more than the kernel buffers for a peer that does not read
            near.send([torch.ones(1 << 24)], to=1, values=True)
        else:
            near.receive(source=1, values=True)
    except RuntimeError as error:
        report("freed", recognised=GlooBackend().is_failure(error))
    thread.join()
    near.p2p.close()
    group.retire()
    report("retired")


def many_generations(
    report: Report,
    path: str,
    rank: int,
    world_size: int,
    number: int,
) -> None:
    """Make and leave groups one after another, every second one in the middle of a step."""
    backend = GlooBackend()
    ticks = [time.perf_counter()]
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    model = torch.nn.Linear(8, 8)
    num_before = _num_descriptors()
    for generation in range(1, number + 1):
        group = _group(path, rank, world_size, generation, backend=backend)
        process_group = group.open()
        ddp = DistributedDataParallel(model, process_group=process_group, init_sync=False)
        ddp.register_comm_hook(None, GradientExchange(process_group, lambda _: "w").average)
        ddp(torch.ones(2, 8)).sum().backward()
        if generation % 2 and rank == generation % world_size:
            group.cut("test")
        elif generation % 2:
            try:
                ddp(torch.ones(2, 8)).sum().backward()
            except RuntimeError as error:
                error.__traceback__ = None
            group.cut("test")
        del ddp.logger, ddp.reducer
        group.retire()
    del ddp, group, process_group, backend
    assert retired.free_now(30)
    over.set()
    ticker.join()
    pauses = [later - earlier for earlier, later in pairwise(ticks)]
    report("done", descriptors=_num_descriptors() - num_before, longest_pause_s=max(pauses))


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough


# --- whole training runs ---

NUM_SAMPLES = 47
BATCH_SIZE = 10
EPOCHS = 4
NUM_STEPS = 5 * EPOCHS


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Make 47 samples: the last batch of an epoch has 7, and no batch divides by three."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def model_and_optimizer(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A member's part in a test."""

    coordinator: str
    job: str
    member_id: str
    min_members: int = 1
    desired_members: int = 1
    max_members: int = 8
    fault: str = ""
    """Fault of this member: "kill in forward", "nan", "raise" ..."""
    at_step: int = 7
    batch_size: int = BATCH_SIZE
    epochs: int = EPOCHS
    hold_at: int = -1
    """Step before which the member waits once until the test opens `gate`."""
    gate: str = ""
    """Path of a named pipe of this member."""
    strategy: str = "ddp"
    host: str = ""
    """Host that the member reports."""
    address: str = ""
    """Address that the member reports."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere(JoinConfig):
    """Configuration of a member that reports another host than its own."""

    host: str

    def member(self) -> Member:
        member = super().member()
        member.info.host = self.host
        return member


def session_of(run: Run) -> Session:
    """Make a session as `shoal.join` does."""
    config = JoinConfig(
        job=run.job,
        coordinators=(run.coordinator,),
        member_id=run.member_id,
        min_members=run.min_members,
        max_members=run.max_members,
        desired_members=run.desired_members,
        address=run.address,
    )
    return Session(Elsewhere(**vars(config), host=run.host) if run.host else config)


class ReportsBringUp(DDP):
    """Reports when this member begins to wait for the others."""

    report: Report

    def enter(self, generation: Generation) -> None:
        self.report("entering", generation=generation.number)
        super().enter(generation)


class DiesInBringUp(ReportsBringUp):
    """Kills the member while it loads the state of another."""

    def restore(self, state_shard: StateShard) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def train(report: Report, run: Run) -> None:
    """Run the README's training loop, with a fault in it."""
    # Each member starts from other weights: the first bring-up makes them the same.
    model, optimizer = model_and_optimizer(seed=ord(run.member_id))
    strategy: str | Strategy = run.strategy
    if strategy == "ddp":
        kind = DiesInBringUp if run.fault == "kill in bring-up" else ReportsBringUp
        strategy = kind(bucket_mb=0.0005)
        strategy.report = report
    held = False
    with session_of(run) as session:
        replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=run.epochs):
            if batch.step == run.hold_at and not held:
                held = True
                report("holds")
                Path(run.gate).read_bytes()
            at_fault = run.fault if batch.step == run.at_step else ""
            if not run.strategy.startswith("async"):
                place = {"rank": session.rank, "world_size": session.world_size}
                report(
                    "tried",
                    step=batch.step,
                    generation=session.generation,
                    **place,
                    epoch=batch.epoch,
                    indices=batch.indices,
                )
            else:
                report("tried", step=batch.step, epoch=batch.epoch, indices=batch.indices)
            with session.step() as step:
                loss = loss_of(replica(batch.inputs), batch.targets)
                prepare_fault(at_fault, model, optimizer)
                if at_fault == "raise":
                    raise ValueError("a bug in the script")
                session.backward(loss * float("nan") if at_fault == "nan" else loss)
            if step.committed:
                report(
                    "committed",
                    step=batch.step,
                    generation=session.generation,
                    at_s=time.monotonic(),
                )
        weights = [parameter.tolist() for parameter in model.parameters()]
    report("finished", weights=weights, step=session.step_number)


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets)


def prepare_fault(fault: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Arrange for the process to die or stop at this point of the step."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if fault == "kill in forward":
        die()
    elif fault == "kill in backward":
        # The first layer's gradient is the last one: other buckets are being reduced by then.
        next(model.parameters()).register_hook(die)
    elif fault == "kill in optimizer":
        optimizer.register_step_pre_hook(die)
    elif fault == "stop in backward":
        next(model.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def exchange_state(report: Report, path: str, rank: int, world_size: int) -> None:
    """Send a state with every kind of tensor from rank 0 to the others."""
    group = _group(path, rank, world_size)
    process_group = group.open()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(5, generator=generator).half(),
        "brain": torch.randn(3, 3, generator=generator).bfloat16(),
        "double": torch.randn(7, dtype=torch.float64, generator=generator),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "big": torch.randn(9_000_000, generator=generator),
    }
    state = StateShard(
        step=11,
        shards={name: TensorShard.whole(tensor) for name, tensor in tensors.items()},
        values={"lr": 0.1, "betas": [0.9, 0.999], "none": None},
    )
    if rank == 0:
        send(state, list(range(1, world_size)), process_group)
    else:
        got = receive(0, list(range(1, world_size)), process_group)
        assert (got.step, got.values) == (state.step, state.values)
        for name, tensor in tensors.items():
            assert got.shards[name].tensor.dtype == tensor.dtype
            assert torch.equal(got.shards[name].tensor, tensor), name
    report("same")
    dist.all_reduce(torch.zeros(1))
    group.retire()


def train_validated(report: Report, run: Run) -> None:
    """Run `train` with a validator that rejects rosters if the member's fault is "rejects"."""

    @shoal.validator("scratch")
    def scratch(roster: shoal.Roster) -> shoal.Reject | None:
        return shoal.Reject(seen="1 GB", expected="10 GB") if run.fault == "rejects" else None

    train(report, run)
