"""Bodies of ranks in the tests of compression: a module that their processes can import."""

import os
import signal
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.processes.ranks import Report
from support.training.rank_bodies import Run, data, model_and_optimizer, prepare_fault, session_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.compression import COMPRESSIONS, find_compression
from shoal.compression.base import Compression, Compressor
from shoal.compression.exchange import CompressedExchange
from shoal.compression.gradient_exchange import GradientExchange
from shoal.compression.low_rank import PowerSGD
from shoal.compression.quantised import Int8, OneBit
from shoal.compression.sparse import TopK
from shoal.compression.wire import Traffic, Wire
from shoal.demo import data as digits
from shoal_proto.errors import ShoalError

SHAPES: Mapping[str, tuple[int, ...]] = {
    "a.weight": (13, 7),
    "a.bias": (13,),
    "scale": (),
    "b.weight": (5, 3, 2, 2),
    "b.bias": (5,),
}
"""171 values, which neither a world size nor a block divides."""
LOSSY: Sequence[Compression] = (Int8(block=16), OneBit(block=8), TopK(ratio=0.1), PowerSGD(rank=2))
"""Compressions that keep residuals."""
NUM_STEPS = 4


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Return a rank's gradients in a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean_gradients(world_size: int, step: int) -> dict[str, Tensor]:
    every = [gradients(rank, step) for rank in range(world_size)]
    return {name: sum(each[name] for each in every) / world_size for name in SHAPES}


def default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def wire() -> Wire:
    return Wire(default_group(), Traffic())


def checksum(values: Mapping[str, Tensor]) -> int:
    return zlib.crc32(b"".join(values[name].numpy().tobytes() for name in sorted(values)))


def average_in_buckets(
    compressor: Compressor, values: Mapping[str, Tensor], buckets: Sequence[Sequence[str]], on: Wire
) -> dict[str, Tensor]:
    averages: dict[str, Tensor] = {}
    for names in buckets:
        averages |= compressor.average({name: values[name] for name in names}, on)
    return averages


# --- bodies; each returns the values that a test compares ---


def average_each() -> dict[str, list[dict[str, Tensor]]]:
    """Return the averages of some steps with every compression, in one bucket."""
    seen = {}
    for compression in (*LOSSY, find_compression("fp16"), find_compression("bf16")):
        compressor, on = compression.compressor(), wire()
        steps = []
        for step in range(NUM_STEPS):
            compressor.begin(step)
            steps.append(compressor.average(gradients(on.rank, step), on))
        seen[compression.name] = steps
    return seen


class Complex(nn.Module):
    """A model with complex weights, or with the same numbers in real parameters."""

    def __init__(self, *, is_real: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in (("first", (8, 32)), ("shift", (32,)), ("second", (32, 2))):
            drawn = torch.randn((*shape, 2), generator=generator) * 0.3
            stored = drawn.flatten(-2) if is_real else torch.view_as_complex(drawn)
            setattr(self, name, nn.Parameter(stored))
        self.is_real = is_real

    def forward(self, inputs: Tensor) -> Tensor:
        first, shift, second = self.parameters()
        if self.is_real:
            first, shift, second = (
                torch.view_as_complex(each.unflatten(-1, (-1, 2))) for each in self.parameters()
            )
        return ((inputs.to(torch.complex64) @ first + shift) @ second).abs()


def train_complex_each() -> dict[str, tuple[Tensor, Tensor]]:
    """Return the weights, as real numbers, of a model with complex parameters and of its real
    twin, after some steps with every compression."""
    seen = {}
    for compression in (*LOSSY, find_compression("fp16"), find_compression("bf16")):
        ends = []
        for is_real in (False, True):
            model: Any = Complex(is_real=is_real)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = shoal.distribute(
                model, optimizer, shoal.DDP(compression=compression)
            )
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                model(torch.randn(6, 8, generator=generator)).square().mean().backward()
                optimizer.step()
            whole = [each.detach() for each in model.parameters()]
            ends.append(torch.cat([t.view(torch.float32).flatten() for t in whole]))
        seen[compression.name] = (ends[0], ends[1])
    return seen


def drain_each(num_steps: int) -> dict[str, tuple[dict[str, Tensor], list[int]]]:
    """Return the sum of all averages, after further steps with zero gradients, and a checksum of
    each step's averages.

    The order of parameters changes after the first step, and again later.
    """
    layouts = [
        [["b.bias", "b.weight", "scale", "a.bias", "a.weight"]],
        [["a.weight", "scale"], ["b.weight", "b.bias", "a.bias"]],
        [["scale", "b.weight"], ["a.weight", "a.bias"], ["b.bias"]],
    ]
    seen = {}
    for compression in LOSSY:
        compressor, on = compression.compressor(), wire()
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        checksums = []
        for step in range(num_steps):
            compressor.begin(step)
            own = gradients(on.rank, step) if step < NUM_STEPS else {}
            values = {name: own.get(name, torch.zeros(shape)) for name, shape in SHAPES.items()}
            layout = layouts[0 if step == 0 else 1 if step < 3 else 2]
            averages = average_in_buckets(compressor, values, layout, on)
            checksums.append(checksum(averages))
            for name, average in averages.items():
                total[name] += average
        seen[compression.name] = (total, checksums)
    return seen


def redo_each() -> dict[str, tuple[int, int, int]]:
    """Return checksums of a failed step, of the repeated step, and of the next step with the same
    gradients."""
    seen = {}
    for compression in LOSSY:
        compressor, on = compression.compressor(), wire()
        sums = []
        for step in (6, 7, 7, 8):
            compressor.begin(step)
            own = gradients(on.rank, min(step, 7))
            sums.append(checksum(compressor.average(own, on)))
        seen[compression.name] = (sums[1], sums[2], sums[3])
    return seen


def join_each() -> dict[str, list[int]]:
    """Return a checksum of each step. Rank 0 has trained alone before; the others are new."""
    solo = dist.new_group([0])
    seen = {}
    for compression in LOSSY:
        compressor, on = compression.compressor(), wire()
        if on.rank == 0:
            compressor.begin(0)
            compressor.average(gradients(9, 0), Wire(solo, Traffic()))
        sums = []
        for generation in (1, 2):
            compressor.regroup()
            for step in range(3):
                compressor.begin(generation * 3 + step)
                sums.append(checksum(compressor.average(gradients(on.rank, step), on)))
            if on.rank == 1:
                compressor = compression.compressor()
        seen[compression.name] = sums
    return seen


def count_each(num_values: int) -> dict[str, tuple[int, int]]:
    """Return the bytes sent, and those that an uncompressed all-reduce sends, with default
    options."""
    seen = {}
    for name in COMPRESSIONS:
        on = wire()
        compressor = find_compression(name).compressor()
        values = {"w": torch.ones(num_values // 10, 10), "b": torch.ones(7)}
        compressor.average(values, on)
        seen[name] = (on.traffic.sent_bytes, on.traffic.plain_bytes)
    return seen


def spread_each(bad: float) -> dict[str, list[bool]]:
    """Return if the averages are finite, for small and for large gradients; rank 1 has a bad
    number."""
    seen = {}
    for name in COMPRESSIONS:
        for size in (5, 40):
            on = wire()
            values = {"w": torch.ones(size, size), "b": torch.ones(size)}
            if on.rank == 1:
                values["w"][1, 2] = bad
            averages = find_compression(name).compressor().average(values, on)
            finite = all(bool(average.isfinite().all()) for average in averages.values())
            seen.setdefault(name, []).append(finite)
    return seen


# --- DDP ---


class HalfUsed(nn.Module):
    """A model whose layer "never" is in no loss, and layer "odd" only in those of odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.odd = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.used(inputs)
        return outputs + self.odd(inputs) if dist.get_rank() % 2 else outputs


class Replica:
    """A model under DDP with Shoal's hook, as the strategy makes it."""

    def __init__(self, model: nn.Module, compression: str, *, bucket_mb: float = 0.02) -> None:
        self.model = model
        self.traffic = Traffic()
        group = default_group()
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.exchange = (
            CompressedExchange(
                group, names.__getitem__, self.traffic, find_compression(compression).compressor()
            )
            if compression != "none"
            else GradientExchange(group, names.__getitem__, self.traffic)
        )
        self.ddp = DistributedDataParallel(
            model,
            process_group=group,
            init_sync=False,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=isinstance(model, HalfUsed),
        )
        self.ddp.register_comm_hook(None, self.exchange.average)

    def step(self, number: int, loss_of: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        self.exchange.begin(number)
        loss_of(self.ddp).backward()
        assert self.exchange.complete
        self.exchange.check(number)
        optimizer.step()


def fill(model: nn.Module) -> None:
    """Set the same weights on all ranks, not by torch's generator, which threads share."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        bound = parameter.shape[-1] ** -0.5
        nn.init.uniform_(parameter, -bound, bound, generator=generator)


def train_digits(num_steps: int, batch: int) -> dict[str, tuple[float, int, dict[str, float]]]:
    """Return, by compression, the accuracy on the test images, a checksum of the weights and the
    traffic."""
    loaded = digits.load()
    images, targets = loaded.train.tensors
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen = {}
    for name in ("none", *COMPRESSIONS):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(),
            nn.Linear(96, 10),
        )  # fmt: skip
        fill(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        replica = Replica(model, name)
        for step in range(num_steps):
            own = torch.arange(step * batch + rank, (step + 1) * batch, world_size) % len(images)

            def loss_of(ddp: nn.Module, own: Tensor = own) -> Tensor:
                return nn.functional.cross_entropy(ddp(images[own]), targets[own])

            replica.step(step, loss_of, optimizer)
        with torch.no_grad():
            right = model(loaded.test_images).argmax(1) == loaded.test_digits
        weights = {key: value.detach() for key, value in model.named_parameters()}
        seen[name] = (float(right.float().mean()), checksum(weights), replica.traffic.metrics())
    return seen


def leave_out_each() -> dict[str, tuple[bool, int, float]]:
    """Return if parameters in no loss are unchanged, a checksum of the weights, and the change of
    the layer that is in the losses of odd ranks."""
    seen = {}
    for name in COMPRESSIONS:
        model = HalfUsed()
        fill(model)
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        replica = Replica(model, name, bucket_mb=0.0002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))

        def loss_of(ddp: nn.Module, inputs: Tensor = inputs) -> Tensor:
            return ddp(inputs).square().mean()

        for step in range(4):
            replica.step(step, loss_of, optimizer)
        after = {key: value.detach() for key, value in model.named_parameters()}
        same = torch.equal(before["never.weight"], after["never.weight"])
        moved = float((before["odd.weight"] - after["odd.weight"]).abs().max())
        seen[name] = (same, checksum(after), moved)
    return seen


def fault_each() -> dict[str, tuple[str, str]]:
    """Return the error of each compression, as class and parameter, if rank 1's gradient is NaN."""
    seen = {}
    for name in ("none", *COMPRESSIONS):
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1))
        fill(model)
        replica = Replica(model, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        before = checksum({key: value.detach() for key, value in model.named_parameters()})
        if dist.get_rank() == 1:
            model[1].bias.register_hook(lambda gradient: gradient * float("nan"))
        try:
            replica.step(5, lambda ddp: ddp(torch.ones(2, 40)).mean(), optimizer)
        except ShoalError as error:
            seen[name] = (type(error).__name__, error.details.get("parameter", ""))
        assert before == checksum({k: value.detach() for k, value in model.named_parameters()})
    return seen


def stuck_for_good(report: Report, path: str, rank: int) -> None:
    """Stop rank 1 of two; rank 0 averages until its waits are aborted."""
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    replica = Replica(nn.Linear(40, 40), "one-bit")
    optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.01)

    def loss_of(ddp: nn.Module) -> Tensor:
        return ddp(torch.ones(2, 40)).sum()

    for step in range(2):  # in its second step DDP reorders its buckets, with a collective
        replica.step(step, loss_of, optimizer)
    if rank == 1:
        report("stops")
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = threading.Event()
    replica.model.bias.register_hook(lambda _: begun.set())

    def free() -> None:
        begun.wait(60)
        while not replica.exchange.waiter.pending():
            begun.wait(0.01)
        replica.exchange.waiter.abort("the test said so")

    thread = threading.Thread(target=free)
    thread.start()
    try:
        replica.step(2, loss_of, optimizer)
    except RuntimeError as error:
        report("freed", reason=str(error))
    thread.join()
    # Gloo's thread still waits for the peer, so the process cannot end cleanly.
    os._exit(0)


def train_compressed(report: Report, run: Run) -> None:
    """Train in a session with the compression that `run.strategy` names."""
    model, optimizer = model_and_optimizer(seed=ord(run.member_id))
    with session_of(run) as session:
        strategy = shoal.DDP(bucket_mb=0.0005, compression=run.strategy)
        replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
        losses = []
        for batch in session.batches(data(), global_batch_size=run.batch_size, epochs=run.epochs):
            with session.step() as step:
                loss = nn.functional.cross_entropy(replica(batch.inputs), batch.targets)
                prepare_fault(run.fault if batch.step == run.at_step else "", model, optimizer)
                session.backward(loss)
            if step.committed:
                losses.append(float(loss))
                report("committed", step=batch.step, world_size=session.world_size)
        weights = {name: value.detach() for name, value in model.named_parameters()}
        report(
            "finished",
            step=session.step_number,
            checksum=checksum(weights),
            losses=losses,
            metrics=dict(strategy.metrics()),
        )
