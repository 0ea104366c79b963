"""The time of a step compared with plain PyTorch's, measured by CUDA events."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu.case import Case
from gpu.member import Plan, on_device, use_gpu
from gpu.models import Task, chains, gpt, normed
from support.processes.forking import forked
from support.processes.ranks import Ranks, Report
from torch.nn.parallel import DistributedDataParallel

import shoal

WAYS = ("plain", "plain ddp", "ddp", "zero1", "fsdp")
BLOCKS = 3
MOST_OVERHEAD = 1.03
"""Limit of a ddp step, as a multiple of plain DDP's."""


def overhead(case: Case) -> None:
    """Time on one rank a plain loop, plain DDP, and Shoal's ddp, zero1 and fsdp, in turn."""
    found = _by_turns(case, gpt(full=case.machine.full), WAYS, skip=5, count=40)
    _tell(case, "gpt", found)
    if case.machine.device == "cuda":
        ratio = median(found["ddp"]) / median(found["plain ddp"])
        assert ratio <= MOST_OVERHEAD, f"a ddp step takes {ratio:.3f} times that of plain DDP"


def small_layers(case: Case) -> None:
    """Time small steps, which are mostly Shoal's part, and BatchNorm over two ranks; no limit is
    checked."""
    task = chains(64)
    _tell(case, "mlp", _by_turns(case, task, ("plain ddp", "ddp"), skip=20, count=100))
    plan = case.plan("normed", normed(full=case.machine.full), num_steps=30)
    for syncs in (False, True):
        name = "synced_batchnorm_ms" if syncs else "own_batchnorm_ms"
        own = replace(plan, job=f"normed-{syncs}".lower(), sync_batchnorm=syncs)
        with case.cluster() as cluster, Ranks() as ranks:
            from gpu.case import Crew  # noqa: PLC0415

            crew = Crew(case, ranks, cluster, own)
            crew.start_all(2)
            crew.finish("m0", "m1")
            times = [each["at_s"] - each["begun_s"] for each in crew.steps("m0")][10:]
            milliseconds = round(1e3 * median(times), 3)
            case.on_gpu_only(name, milliseconds)


def _tell(case: Case, name: str, found: dict[str, list[float]]) -> None:
    for way, milliseconds in found.items():
        label = f"{name}_{way.replace(' ', '_')}_ms"
        case.on_gpu_only(label, [round(each, 3) for each in milliseconds])


def _by_turns(
    case: Case, task: Task, ways: Sequence[str], *, skip: int, count: int
) -> dict[str, list[float]]:
    """Milliseconds of a step in each block, by variant. Each variant has a process; one runs at a
    time."""
    turns = [forked.Semaphore(0) for _ in ways]
    with case.cluster() as cluster, Ranks() as ranks:
        started = [
            ranks.start(
                _in_blocks,
                case.plan(f"timed-{number}", task, coordinator=cluster.coordinator),
                way,
                str(case.directory / f"store-{number}-{case.machine.device}"),
                Turns(turns, number, skip, count),
            )
            for number, way in enumerate(ways)
        ]
        for rank in started:
            rank.expect("ready", case.patience_s)
        turns[0].release()
        found = [rank.expect("timed", case.patience_s)["ms"] for rank in started]
    return dict(zip(ways, found, strict=True))


class Turns:
    """The blocks of steps of one process, which alternate with those of the others."""

    def __init__(self, turns: Sequence[Any], own: int, skip: int, count: int) -> None:
        self._turns, self._own = turns, own
        self._skip, self._count = skip, count
        self.num_steps = BLOCKS * (skip + count)
        self.milliseconds: list[float] = []

    def run(self, step: Callable[[], None], device: str) -> None:
        """Run all blocks, with steps that need nothing else between them."""
        for _ in range(self.num_steps):
            self.before(device)
            step()
            self.after(device)

    def before(self, device: str) -> None:
        """Begin a step: wait for this process' turn, and start the clock after the skipped
        steps."""
        place = self._place = getattr(self, "_place", -1) + 1
        within = place % (self._skip + self._count)
        if not within:
            self._turns[self._own].acquire()
        if within == self._skip:
            self._begun = _mark(device)

    def after(self, device: str) -> None:
        """End a step: after the block's last one, record the time and pass the turn on."""
        if (self._place + 1) % (self._skip + self._count):
            return
        self.milliseconds.append(_milliseconds(self._begun, _mark(device)) / self._count)
        if device == "cuda":
            # The other processes need the memory.
            torch.cuda.empty_cache()
        self._turns[(self._own + 1) % len(self._turns)].release()

    def give_up(self) -> None:
        """Let the others finish without this process."""
        for _ in range(BLOCKS):
            self._turns[(self._own + 1) % len(self._turns)].release()


def _mark(device: str) -> Any:
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begun: Any, ended: Any) -> float:
    if isinstance(begun, float):
        return float(ended - begun) * 1e3
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def _in_blocks(report: Report, plan: Plan, way: str, store: str, turns: Turns) -> None:
    device = use_gpu(plan.machine, plan.index)
    report("ready")
    try:
        if way.startswith("plain"):
            _plainly(plan, way, store, turns, device)
        else:
            _in_session(plan, way, turns, device)
    except BaseException:
        turns.give_up()
        raise
    report("timed", ms=turns.milliseconds)


def _computing(device: str) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()


def _plainly(plan: Plan, way: str, store: str, turns: Turns, device: str) -> None:
    task = plan.task
    model, optimizer = task.build(device)
    called: Any = model
    if way == "plain ddp":
        file = dist.FileStore(store, 1)
        dist.init_process_group(plan.machine.backend, store=file, rank=0, world_size=1)
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    samples = on_device(task, device)
    rows = torch.arange(task.batch, device=device)

    def step() -> None:
        inputs, targets = samples[0][rows], samples[1][rows]
        with _computing(device):
            loss = task.loss(called(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    turns.run(step, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def _in_session(plan: Plan, way: str, turns: Turns, device: str) -> None:
    task = plan.task
    with shoal.join(
        job=plan.job, coordinator=plan.coordinator, member_id="timed", desired_members=1
    ) as session:
        model, optimizer = task.build(device)
        model, optimizer = session.distribute(model, optimizer, strategy=way)
        for batch in session.batches(
            on_device(task, device), global_batch_size=task.batch, epochs=task.epochs
        ):
            turns.before(device)
            with session.step():
                with _computing(device):
                    loss = task.loss(model(batch.inputs), batch.targets)
                session.backward(loss)
                if batch.step + 1 == turns.num_steps:
                    session.stop("all is timed")
            turns.after(device)
