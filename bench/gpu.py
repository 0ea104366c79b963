"""Counts of a step's waits for the GPU, and of its copies between GPU and host.

    make bench NAME=gpu
    .venv/bin/python bench/gpu.py ddp fsdp       # these only

One member of a session takes steps with a model of 2.1 MB; torch.profiler records 20 of them after
the first 20, in which a session makes extra comparisons. All figures are means for one of the 20
steps. Copies of the state for peers are not included: one member has no peer.

- `syncs_STRATEGY`: calls in which the host waits for a stream, a device or an event.
- `to_host_STRATEGY`, `to_device_STRATEGY`: copies to and from the host.
- `pageable_STRATEGY`: copies among these that use pageable memory, for which the host waits.
- The peer of each figure: the same for plain steps of the model with torch alone. It has no
  clipping, loss scaling or BatchNorm, whatever the variant.

Variants with `-amp` scale their losses (GradScaler, fp16); `-clip` clips gradients; `-batchnorm`
normalises over all members; `-forward` uses `session.forward_backward`.

Without a GPU this is a dry run, on two members that are threads. For one of them, `looks_STRATEGY`
counts operations that would wait for a GPU (reading a number, comparing tensors), including
operations in torch's optimizer and collectives. `copies_STRATEGY` counts operations that make a
tensor of another dtype or on another device.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rows import Row, publish
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile
from training.strategy_models import GLOBAL_BATCH, NUM_SAMPLES, WIDTH, new_model, samples

import shoal
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

WARM_STEPS, STEPS = 20, 20
HAS_GPU = torch.cuda.is_available()
NUM_MEMBERS = 1 if HAS_GPU else 2
"""Number of members. They are threads, which cannot have a GPU each, and by default NCCL allows one
member on a GPU."""
VARIANTS = (
    *("ddp", "ddp-forward", "ddp-clip", "ddp-batchnorm", "ddp-amp"),
    *("zero1", "zero1-clip", "zero2", "fsdp", "fsdp-clip", "fsdp-batchnorm", "fsdp-amp"),
    *("tensor", "tensor-clip", "pipeline-forward", "local-sgd", "diloco"),
)
ON_GPU = {
    "syncs": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "to_host": ("Memcpy DtoH",),
    "to_device": ("Memcpy HtoD",),
    "pageable": ("Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"),
}
ON_HOST = {
    "looks": ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero"),
    "copies": ("aten::_to_copy",),
}
FIGURES = ON_GPU if HAS_GPU else ON_HOST
"""Figures. An event of the profiler counts for a figure if its name begins with one of these."""


class Model(nn.Module):
    """The model of bench/strategies.py, with a BatchNorm in front if `normed`."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.layers = new_model()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(self.norm(inputs))
        return outputs


class Profiled:
    """Events that the profiler recorded in the STEPS steps after WARM_STEPS."""

    def __init__(self, *, is_seen: bool = True) -> None:
        # A process has one profiler at a time.
        self._is_seen = is_seen
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_GPU else [])]
        )
        self._begun = 0

    def before_step(self) -> bool:
        """False once all steps have been seen."""
        if self._begun == WARM_STEPS and self._is_seen:
            self._profiler.start()
        if self._begun == WARM_STEPS + STEPS and self._is_seen:
            self._profiler.stop()
        self._begun += 1
        return self._begun <= WARM_STEPS + STEPS

    def per_step(self) -> Counter[str]:
        seen: Any = self._profiler
        events = list(seen.events() or ())
        return Counter(
            {
                figure: sum(each.name.startswith(names) for each in events)
                for figure, names in FIGURES.items()
            }
        )


def new_strategy(name: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "tensor": lambda: shoal.TensorParallel(min_split_bytes=0),
        "local-sgd": lambda: shoal.LocalSGD(every_steps=5),
        "diloco": lambda: shoal.DiLoCo(every_steps=5),
    }
    return made[name]() if name in made else name


def train(coordinator: str, variant: str, is_seen: bool) -> Profiled:
    """Take a member's steps; return its profile."""
    strategy, _, way = variant.partition("-")
    if variant in ("local-sgd", "diloco"):
        strategy, way = variant, ""
    device = torch.device("cuda" if HAS_GPU else "cpu")
    profiled = Profiled(is_seen=is_seen)
    with shoal.join(
        f"gpu-{variant}",
        coordinator=coordinator,
        desired_members=NUM_MEMBERS,
        backend=None if HAS_GPU else "in-memory",
    ) as session:
        model: Any = Model(normed=way == "batchnorm").to(device)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        scaler = torch.amp.GradScaler(device.type) if way == "amp" else None
        if scaler is not None:
            session.register("scaler", scaler)
        model, optimizer = session.distribute(
            model, optimizer, new_strategy(strategy), sync_batchnorm=way == "batchnorm"
        )
        # On the device beforehand: copies by the script itself do not count.
        inputs, targets = (each[:GLOBAL_BATCH].to(device) for each in samples())
        epochs = -(-(WARM_STEPS + STEPS + 1) * GLOBAL_BATCH // NUM_SAMPLES)
        for batch in session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=epochs):
            if not profiled.before_step():
                session.stop("all is counted")
                break
            own = slice(0, len(batch.inputs))
            with session.step():
                if way == "forward":
                    given: Any = batch
                    session.forward_backward(given, mse_loss)
                else:
                    with autocast(device, enabled=scaler is not None):
                        loss = mse_loss(model(inputs[own]), targets[own])
                    session.backward(loss if scaler is None else scaler.scale(loss))
                if way == "clip":
                    session.clip_grad_norm(1.0)
    return profiled


def autocast(device: torch.device, *, enabled: bool) -> Any:
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=enabled)


def by_torch() -> Counter[str]:
    """Counts of the plain loop, without a session."""
    device = torch.device("cuda" if HAS_GPU else "cpu")
    model = Model(normed=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    inputs, targets = (each[:GLOBAL_BATCH].to(device) for each in samples())
    profiled = Profiled()
    while profiled.before_step():
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return profiled.per_step()


def rows_of(variant: str, found: Counter[str], peer: Counter[str]) -> Iterator[Row]:
    for figure in FIGURES:
        yield Row(
            metric=f"{figure}_{variant}",
            value=found[figure] / STEPS,
            unit="a step",
            runs=STEPS,
            peer="torch",
            peer_value=peer[figure] / STEPS,
        )


@contextmanager
def members() -> Iterator[Callable[[str], Counter[str]]]:
    """Yield a function that counts the events of a variant, on the first of the members."""
    with (
        tempfile.TemporaryDirectory() as place,
        LocalCluster(LocalClusterConfig(directory=Path(place), num_parameter_servers=0)) as cluster,
        ThreadPoolExecutor(NUM_MEMBERS) as threads,
    ):

        def count(variant: str) -> Counter[str]:
            runs = [
                threads.submit(train, cluster.coordinator, variant, not number)
                for number in range(NUM_MEMBERS)
            ]
            seen, *_ = [run.result() for run in runs]
            return seen.per_step()

        yield count


def main() -> None:
    variants = sys.argv[1:] or VARIANTS
    peer = by_torch()
    rows: list[Row] = []
    with members() as count:
        for variant in variants:
            rows += rows_of(variant, count(variant), peer)
    publish("gpu" if HAS_GPU else "gpu_dry_run", rows)


if __name__ == "__main__":
    main()
