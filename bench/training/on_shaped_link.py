"""Script of a rank of bench/compression.py: trains digits with each compression in turn.

    on_shaped_link.py '{"rank": 0, ...}'      # the fields of `Part`

Prints one JSON line for each training.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.backends.network.gloo import GlooBackend
from shoal.backends.process_group.interface import Seat
from shoal.compression import find_compression
from shoal.compression.exchange import exchange_for
from shoal.compression.wire import Traffic
from shoal.demo import data as digits

NONE = "none"
HIDDEN = 1024
GLOBAL_BATCH = 64
LEARNING_RATE = 0.3
COLLECTIVE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """Configuration of one rank."""

    rank: int
    world_size: int
    address: str
    store: str
    """A file that all ranks share."""
    data: str
    trainings: list[tuple[str, int]]
    """Compression and seed of each training."""
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of one training."""

    name: str
    seed: int
    losses: list[float]
    """Mean over this rank's samples, by step."""
    ended_s: list[float]
    """Time from the start to the end of each step."""
    accuracy: float
    """Accuracy on the held-out images, in percent."""
    counted_bytes: int
    wire_bytes: int
    """Bytes that the kernel counted on the interface, with headers and acknowledgements."""


def new_model(seed: int) -> nn.Module:
    """1,126,410 parameters, 4.5 MB."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )


def order_of(seed: int, num_samples: int, num_steps: int) -> Tensor:
    """Return the samples of each step; every epoch is shuffled again."""
    generator = torch.Generator().manual_seed(seed)
    num_epochs = -(-num_steps * GLOBAL_BATCH // num_samples)
    epochs = [torch.randperm(num_samples, generator=generator) for _ in range(num_epochs)]
    return torch.cat(epochs)[: num_steps * GLOBAL_BATCH].view(num_steps, GLOBAL_BATCH)


def train(part: Part, name: str, seed: int, data: digits.Digits) -> Training:
    images, targets = data.train.tensors
    model = new_model(seed)
    group = dist.group.WORLD
    assert group is not None
    names = {parameter: key for key, parameter in model.named_parameters()}
    traffic = Traffic()
    compressor = None if name == NONE else find_compression(name).compressor()
    exchange = exchange_for(group, names.__getitem__, traffic, compressor)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    ddp.register_comm_hook(None, exchange.average)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, ended_s = [], []
    dist.barrier()
    sent_before, started_s = sent_bytes(), time.monotonic()
    for step, samples in enumerate(order_of(seed, len(images), part.num_steps)):
        own = samples.chunk(part.world_size)[part.rank]
        optimizer.zero_grad(set_to_none=True)
        exchange.begin(step)
        loss = nn.functional.cross_entropy(ddp(images[own]), targets[own])
        loss.backward()
        exchange.check(step)
        optimizer.step()
        losses.append(float(loss.detach()))
        ended_s.append(time.monotonic() - started_s)
    with torch.no_grad():
        right = model(data.test_images).argmax(1) == data.test_digits
    return Training(
        name=name,
        seed=seed,
        losses=losses,
        ended_s=ended_s,
        accuracy=100 * float(right.float().mean()),
        counted_bytes=traffic.sent_bytes,
        wire_bytes=sent_bytes() - sent_before,
    )


def sent_bytes() -> int:
    """Return the bytes sent by this namespace's interface."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise RuntimeError("no eth0: bench/compression.py runs this script in a network namespace")


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    seat = Seat(
        generation=1,
        rank=part.rank,
        world_size=part.world_size,
        address=part.address,
        bring_up_s=60.0,
        collective_s=COLLECTIVE_S,
    )
    group = GlooBackend().group(seat, dist.FileStore(part.store, part.world_size))
    group.open()
    data = digits.load(Path(part.data))
    for name, seed in part.trainings:
        print(json.dumps(vars(train(part, name, seed, data))), flush=True)
    dist.barrier()
    group.retire()


if __name__ == "__main__":
    main()
