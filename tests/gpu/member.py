"""The processes of the cases: members of a job, with a fault at a point that the case chooses."""

import hashlib
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu.machine import Machine
from gpu.models import Task
from support.processes.ranks import Report
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shoal
from shoal.backends.network.gloo import GlooGroup
from shoal.backends.network.nccl import NcclGroup
from shoal.data.batches import Loader
from shoal.strategies import find_strategy

GROUPS: tuple[Any, ...] = (GlooGroup, NcclGroup)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal that a member sends to itself."""

    place: str
    """The point: "backward" is between two layers' backward passes, "exchange" before an all-reduce
    of more than 64 values, "before the group" and "within the group" at the making of a
    generation's group."""
    step: int = 0
    """The first step in which it may happen."""
    number: int = signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The part of one member."""

    machine: Machine
    task: Task
    directory: str
    """The folder for the weights, one file for each member."""
    job: str
    member_id: str | None = None
    """Name of the member; a launcher gives it if it is None."""
    coordinator: str | None = None
    """Address of the coordinator; a launcher gives it if it is None."""
    index: int = 0
    """GPU of this member; unused under a launcher, which chooses it."""
    strategy: str = "ddp"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy."""
    sync_batchnorm: bool = False
    min_members: int | None = None
    desired_members: int | None = None
    max_members: int | None = None
    num_steps: int = 0
    """Number of steps; 0 trains until `stop_file` exists."""
    stop_file: str = ""
    pace_s: float = 0.0
    """Time of a step in addition to its computation."""
    fault: Fault | None = None
    checkpoints: str = ""
    """Directory for a checkpoint every 5 steps."""
    compiled: str = ""
    """The backend of torch.compile; empty if the model is not compiled."""
    amp: bool = False
    """Train with a scaler, and autocast to a 16-bit type."""
    infinite_step: int = -1
    """The step in which this member's gradients are infinite."""
    look_file: str = ""
    """File in answer to which this process reports its memory, threads and descriptors once."""


def use_gpu(machine: Machine, rank: int) -> str:
    """Make only the rank's GPU visible to this process, before it uses any; return the device."""
    if machine.device == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.visible_gpu(rank, visible)
    return machine.device


def on_device(task: Task, device: str) -> tuple[Tensor, Tensor]:
    """The samples, moved to the device."""
    inputs, targets = task.data()
    return inputs.to(device), targets.to(device)


def train(report: Report, plan: Plan) -> None:
    """Train until the last step or the stop; report each step, and the file of the weights."""
    _follow_cuts(report)
    _train(report, plan)


def train_each(report: Report, plans: tuple[Plan, ...]) -> None:
    """Run jobs in turn in this process."""
    for plan in plans:
        _train(report, plan)


def _train(report: Report, plan: Plan) -> None:
    device, task = plan.machine.device, plan.task
    if plan.member_id is not None:
        use_gpu(plan.machine, plan.index)
    kept = shoal.Checkpoints(plan.checkpoints, every_steps=5) if plan.checkpoints else None
    with shoal.join(
        job=plan.job,
        coordinator=plan.coordinator,
        member_id=plan.member_id,
        min_members=plan.min_members,
        desired_members=plan.desired_members,
        max_members=plan.max_members,
    ) as session:
        model, optimizer = task.build(device)
        scaler: Any = None
        if plan.amp:
            scaler = session.register("scaler", torch.amp.GradScaler(device, init_scale=1024.0))
        strategy = type(find_strategy(plan.strategy))(**plan.options)
        model, optimizer = session.distribute(
            model,
            optimizer,
            strategy=strategy,
            checkpoints=kept,
            sync_batchnorm=plan.sync_batchnorm,
        )
        report("joined", member=session.member_id)
        steps = StepsOf(report, plan, session, model, scaler)
        for batch in session.batches(
            on_device(task, device), global_batch_size=task.batch, epochs=task.epochs
        ):
            is_last = steps.is_last(batch)
            steps.take(batch, is_last=is_last)
            if is_last and not strategy.synchronous:
                break
        weights = session.state_dict()
        path = Path(plan.directory) / f"{plan.job}-{session.member_id}.pt"
        torch.save(dict(weights), path)
        pinned = all(each.is_pinned() for each in _locals_of(model))
        report("finished", step=session.step_number, weights=str(path), pinned=pinned)


class StepsOf:
    """The steps of one member, and its reports about each."""

    def __init__(
        self, report: Report, plan: Plan, session: shoal.Session, model: nn.Module, scaler: Any
    ) -> None:
        self._report, self._plan, self._session = report, plan, session
        self._model, self._scaler = model, scaler
        self._called: Any = model
        if plan.compiled:
            self._called = torch.compile(model, backend=plan.compiled)
        self._fault = Planted(report, plan.fault) if plan.fault is not None else None
        self._num_taken = 0

    def is_last(self, batch: Any) -> bool:
        """True if the job ends with this batch's step."""
        plan = self._plan
        stops = bool(plan.stop_file) and Path(plan.stop_file).exists()
        return stops or batch.step + 1 == plan.num_steps

    def take(self, batch: Any, *, is_last: bool = False) -> None:
        """Train on one batch; the last one ends the job on all members."""
        plan, session = self._plan, self._session
        if plan.checkpoints and (not self._num_taken or batch.step % 5 == 0):
            self._report("holds", step=batch.step, digest=digest(session.state_dict()))
        self._num_taken += 1
        begun_s, loss = time.monotonic(), torch.tensor(math.nan)
        if self._fault is not None:
            self._fault.begin(batch.step)
        with session.step() as step:
            if plan.amp or plan.compiled:
                loss = _loss(plan, self._called, batch, self._scaler)
                session.backward(loss)
            else:
                loss = session.forward_backward(batch, plan.task.loss)
            if plan.pace_s:
                time.sleep(plan.pace_s)
            if is_last and session.strategy.synchronous:
                session.stop("the case is over")
        if not step.committed:
            self._report("missed", step=batch.step)
            return
        ended_s = time.monotonic()
        entry = {"step": batch.step, "begun_s": begun_s, "at_s": ended_s, **self._place()}
        self._report("committed", loss=float(loss), **entry)
        if plan.look_file and Path(plan.look_file).exists():
            Path(plan.look_file).unlink()
            self._report("looks", **held_by_process())

    def _place(self) -> dict[str, float]:
        """World size and generation of this step, and values that the case compares."""
        session = self._session
        found: dict[str, float] = {"world_size": session.world_size}
        if session.strategy.synchronous:
            found["generation"] = session.generation
        if self._scaler is not None:
            found |= {"scale": self._scaler.get_scale(), "sum": _sum_of(self._model)}
        if self._plan.compiled:
            found["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return found


def _loss(plan: Plan, model: Any, batch: Any, scaler: Any) -> Tensor:
    """The loss of a step with a scaler, or of a compiled model."""
    device = plan.machine.device
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    with torch.autocast(device, dtype=dtype) if plan.amp else nullcontext():
        outputs = model(batch.inputs)
        loss = plan.task.loss(outputs.float(), batch.targets)
    if batch.step == plan.infinite_step:
        outputs.register_hook(lambda gradient: gradient * math.inf)
    scaled: Tensor = loss if scaler is None else scaler.scale(loss)
    return scaled


def _locals_of(model: nn.Module) -> list[Tensor]:
    """The parts of the parameters that this member holds."""
    own = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [tensor.detach() for tensor in own]


def _sum_of(model: nn.Module) -> float:
    """A number that changes whenever the optimizer steps."""
    return sum(float(each.double().abs().sum()) for each in _locals_of(model))


def digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of the weights' bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Planted:
    """A fault at its point, armed from its step on."""

    def __init__(self, report: Report, fault: Fault) -> None:
        self._report, self._fault = report, fault
        self._armed = False
        self._passes = 0
        if fault.place == "backward":
            nn.modules.module.register_module_forward_hook(self._passed)
        elif fault.place == "exchange":
            self._wrap(dist, "all_reduce", self._before_exchange)
        elif fault.place == "before the group":
            for kind in GROUPS:
                self._wrap(kind, "open", self._before_group)
        else:
            self._wrap(dist, "init_process_group", self._around_group)

    def begin(self, step: int) -> None:
        """Arm the fault if this step is late enough."""
        self._armed = step >= self._fault.step
        self._passes = 0

    def strike(self) -> None:
        self._report("struck", at_s=time.monotonic())
        os.kill(os.getpid(), self._fault.number)

    def _passed(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not self._armed or not isinstance(output, Tensor) or not output.requires_grad:
            return output
        return _Strikes.apply(output, self)  # type: ignore[no-untyped-call]

    def backward_passed(self) -> None:
        """Count a layer's backward pass, and strike at the third: gradients of earlier ones are in
        transit."""
        self._passes += 1
        if self._passes == 3:
            self.strike()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: around(call, *given, **named))

    def _before_exchange(self, call: Any, tensor: Tensor, *given: Any, **named: Any) -> Any:
        if self._armed and tensor.numel() > 64:
            self.strike()
        return call(tensor, *given, **named)

    def _before_group(self, call: Any, *given: Any, **named: Any) -> Any:
        self.strike()
        return call(*given, **named)

    def _around_group(self, call: Any, *given: Any, **named: Any) -> Any:
        made = call(*given, **named)
        # NCCL makes its communicator with the first collective, which follows.
        if torch.cuda.is_available():
            threading.Timer(0.05, self.strike).start()
        else:
            self.strike()
        return made


class _Strikes(torch.autograd.Function):
    """Passes values and gradients on, and notifies the fault."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, planted: Planted) -> Tensor:
        context.planted = planted
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.planted.backward_passed()
        return gradient, None


def _follow_cuts(report: Report) -> None:
    """Report how long each cut of a generation's group takes."""
    for kind in GROUPS:
        cut = kind.cut

        def timed(self: Any, reason: str, cut: Any = cut) -> None:
            begun_s = time.monotonic()
            cut(self, reason)
            report("cut", seconds=time.monotonic() - begun_s)

        kind.cut = timed  # type: ignore[method-assign]


def held_by_process() -> dict[str, float]:
    """Device memory, threads, descriptors and resident memory of this process."""
    found: dict[str, float] = {
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "rss_mb": _rss_bytes() / 1e6,
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found |= {"device_mb": (total - free) / 1e6}
    return found


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def train_alone(report: Report, plan: Plan, num_steps: int) -> None:
    """Train the same steps in one process without Shoal's strategies, and save the weights."""
    device, task = use_gpu(plan.machine, plan.index), plan.task
    model, optimizer = task.build(device)
    samples = on_device(task, device)
    loader = Loader(samples, task.order(len(samples[0])))
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    path = Path(plan.directory) / f"alone-{plan.job}.pt"
    torch.save({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, path)
    report("finished", step=num_steps, weights=str(path))
