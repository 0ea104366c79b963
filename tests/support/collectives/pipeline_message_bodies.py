"""Bodies of pipeline stages that send messages through shared memory."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.models import pipeline_models as models
from support.processes.ranks import Report
from torch import Tensor

from shoal.backends.shared_memory.messages import SharedMessages
from shoal.layouts.base import World
from shoal.layouts.pipeline.layout import PipelineLayout, ScheduleSpec
from shoal.layouts.pipeline.relay import Neighbours
from shoal.layouts.pipeline.shared_messages import SharedLanes, lanes_bytes
from shoal.layouts.pipeline.stage_splitter import StageSplitter
from shoal_proto.errors import GenerationBroken, InternalError, MalformedMessage


def _layout(schedule: str, *, shares: bool = True) -> PipelineLayout:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    world = World(rank=dist.get_rank(), world_size=group.size(), device=device, group=group)
    splitter = StageSplitter()
    torch.manual_seed(0)
    model = models.perceptron()
    outline = splitter.outline(model, world.world_size)
    cut = outline, splitter.stage_of(outline, world.world_size)
    initial = {name: each.detach().clone() for name, each in model.named_parameters()}
    layout = PipelineLayout(model, world, cut, ScheduleSpec(schedule=schedule))
    with torch.no_grad():
        for name, parameter in layout.parameters.items():
            parameter.copy_(initial[name])
    # Set as in a session's group.
    layout._words.may_share = shares
    return layout


def _passed(layout: PipelineLayout, size: int, loss: Any = models.squared) -> Tensor:
    inputs, targets = models.numbers()
    rows = torch.arange(size) % len(inputs)
    layout.begin()
    return layout.forward_backward(inputs[rows], targets[rows], loss, 1.0)


def passes(
    sizes: Sequence[int], schedule: str, *, shares: bool
) -> list[tuple[int, Tensor, dict[str, Tensor | None]]]:
    """Run passes over samples of these sizes. Returns the number of messages over the group, the
    loss, and this stage's gradients. Ranks that do not share memory send over the group."""
    layout = _layout(schedule, shares=shares)
    sent: list[Tensor] = []
    p2p = layout._near.p2p
    send, begin = p2p.send, p2p.begin

    def counted(tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        sent.extend(tensors)
        return send(tensors, to, tag)

    def counted_batch(sends: Sequence[tuple[Tensor, int]], *receives: Any) -> Any:
        sent.extend(tensor for tensor, _ in sends)
        return begin(sends, *receives)

    p2p.send, p2p.begin = counted, counted_batch  # type: ignore[method-assign,assignment]
    found = []
    for size in sizes:
        sent.clear()
        for parameter in layout.parameters.values():
            parameter.grad = None
        loss = _passed(layout, size)
        gradients = {name: each.grad for name, each in layout.parameters.items()}
        found.append((len(sent), loss, gradients))
    return found


def run_passes_until_a_fault(
    report: Report, path: str, rank: int, world_size: int, how: str
) -> None:
    """Run passes of three stages; in the fourth the last stage does not reach its loss, by fault
    `how`."""
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    layout = _layout("1f1b")
    for _ in range(3):
        _passed(layout, 8)
    assert layout._lanes is not None

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise KeyError("the user's own")
        report("waits")
        signal.sigtimedwait([signal.SIGUSR1], 60)
        return models.squared(outputs, targets)

    if how == "cut" and rank == 0:
        threading.Timer(0.2, layout.cut, ("on purpose",)).start()
    try:
        _passed(layout, 8, fails)
    except (GenerationBroken, KeyError) as error:
        report("failed", text=str(error))


def refused() -> str:
    """Return the errors for a message of an unexpected size, and for one too many."""
    words = SharedMessages(dist.group.WORLD, 1)  # type: ignore[arg-type]
    sent_bytes = [256, 0]
    words.enable_shared_memory(lanes_bytes(sent_bytes))
    assert words.memory is not None
    lanes = SharedLanes(words.memory, words.beside).lanes(sent_bytes)
    assert lanes is not None
    lanes.begin()
    rank = dist.get_rank()
    try:
        if rank == 0:
            for _ in range(4):
                lanes.send([torch.ones(3)], 1)
        else:
            lanes.recv([torch.ones(4)], 0).wait()
    except InternalError as error:
        return str(error)
    return ""


def malformed_descriptions(sent: Sequence[str], broadcast: Sequence[str]) -> list[str]:
    """Rank 1 sends, and then broadcasts, descriptions of tensors that cannot be read. Returns the
    errors of rank 0."""
    group = dist.group.WORLD
    assert group is not None
    near = Neighbours(group, torch.device("cpu"))
    errors = []
    for text, is_sent in (*((each, True) for each in sent), *((each, False) for each in broadcast)):
        message = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if near.rank == 1:
            for tensor in (torch.tensor([len(message)]), message):
                if is_sent:
                    near.p2p.exchange([(tensor, 0)])
                else:
                    near.p2p.broadcast(tensor, 1)
            continue
        try:
            near.receive(source=1, values=False) if is_sent else near.broadcast(None, source=1)
        except MalformedMessage as error:
            errors.append(str(error))
    near.release()
    return errors
