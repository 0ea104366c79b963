"""Copies of tensors in host memory. A GPU writes asynchronously, and as fast as the bus allows,
only into page-locked memory."""

import copy
import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from shoal.torch_private.tensors import foreach_copy_

log = structlog.get_logger(__name__)

ALIGNMENT_BYTES, MESSAGE_ALIGNMENT_BYTES = 64, 16
BATCH_BYTES = 64 * 1024 * 1024
"""Size of each page-locked buffer of `copy_staged`; a power of two, to which torch rounds up."""


class CopyUnderWay:
    """Handle of copies in progress on GPUs."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        # Blocking: a thread that waits for a copy must not keep a CPU busy.
        self._events = [
            torch.cuda.current_stream(device).record_event(
                torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            )
            for device in devices
        ]

    def wait(self) -> None:
        """Block until the copies are complete. Any thread may call it, also repeatedly."""
        for event in self._events:
            event.synchronize()


@torch.no_grad()
def copy_to_host(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> CopyUnderWay:
    """Begin to copy each source into the target of the same index. The targets must be in host
    memory. Once this returns, sources on the host may be changed; sources on a GPU only by work
    that is queued on the GPU's current stream, as the copy is."""
    foreach_copy_(list(targets), list(sources), non_blocking=True)
    return queued_work(sources)


def queued_work(tensors: Sequence[Tensor]) -> CopyUnderWay:
    """Return a handle for all work queued so far on the current streams of the tensors' GPUs."""
    return CopyUnderWay(_gpus(tensors))


def _gpus(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


def host_memory(num_bytes: int, sources: Sequence[Tensor]) -> Tensor:
    """Return `num_bytes` of uninitialized memory. If a source is on a GPU, the memory is
    page-locked until the last view of the result is freed; if the CUDA runtime refuses that, a
    warning is logged and ordinary memory returned. torch would round page-locked memory up to a
    power of two."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if not num_bytes or not (devices := _gpus(sources)):
        return memory
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    locked = page_locked(memory, cudart)
    if locked is None:
        log.warning(
            "host_memory_not_pinned",
            num_bytes=num_bytes,
            hint="copies from the GPU to this memory are slower, and the trainer waits for them",
        )
        _take_error(devices[0])
        return memory
    return locked


def page_locked(memory: Tensor, cudart: Any) -> Tensor | None:
    """Have the CUDA runtime lock this memory, and return a view of it; None if the runtime refuses.
    The memory stays locked while any tensor views the result."""
    pointer, num_bytes = memory.data_ptr(), memory.numel()
    if int(cudart.cudaHostRegister(pointer, num_bytes, 0)):
        return None
    # A tensor made by torch.frombuffer and all its views keep the buffer alive.
    buffer = (ctypes.c_char * num_bytes).from_address(pointer)
    weakref.finalize(buffer, _unlock, memory, cudart).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _unlock(memory: Tensor, cudart: Any) -> None:
    cudart.cudaHostUnregister(memory.data_ptr())


def _take_error(device: torch.device) -> None:
    """Clear the CUDA error of the refusal: else the next kernel would seem to fail."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        log.debug("host_memory_pin_refused", reason=str(error))


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as contiguous tensors in host memory, copied only if needed."""
    moved = {name: tensor for name, tensor in tensors.items() if not tensor.is_cpu}
    copies = {}
    if moved:
        pinned = bool(_gpus(list(moved.values())))
        copies = dict(zip(moved, side_by_side(list(moved.values()), pinned=pinned), strict=True))
        copy_to_host(list(copies.values()), list(moved.values())).wait()
    return {
        name: copies[name] if name in copies else tensor.detach().contiguous()
        for name, tensor in tensors.items()
    }


def aligned(num_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    return -(-num_bytes // alignment_bytes) * alignment_bytes


def side_by_side(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return uninitialized tensors like these, in one block of memory on the host."""
    sizes = [aligned(each.nbytes) for each in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    return [
        part[: each.nbytes].view(each.dtype).view(each.shape)
        for part, each in zip(torch.split(memory, sizes), tensors, strict=True)
    ]


@torch.no_grad()
def copy_staged(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into the target of the same index, in ordinary host memory; return when all
    copies are complete. Sources on a GPU are copied through page-locked buffers, so that the
    targets need not be page-locked."""
    host_pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if not s.is_cuda]
    for target, source in host_pairs:
        target.copy_(source.detach())
    for device in _gpus(sources):
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s.device == device]
        copy_batches(pairs, BATCH_BYTES, pinned=True)


def copy_batches(pairs: Sequence[tuple[Tensor, Tensor]], batch_bytes: int, *, pinned: bool) -> None:
    """Copy pairs of (target, source) as `copy_staged` does. All sources must be on one device."""
    buffers = [torch.empty(batch_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    full: tuple[Sequence[Tensor], Sequence[Tensor], CopyUnderWay] | None = None
    for number, batch in enumerate(_batches(pairs, batch_bytes)):
        targets, sources = zip(*batch, strict=True)
        parts = torch.split(buffers[number % 2][: sum(map(len, sources))], list(map(len, sources)))
        in_progress = copy_to_host(parts, sources)
        _empty_buffer(full)
        full = (targets, parts, in_progress)
    _empty_buffer(full)


def _empty_buffer(full: tuple[Sequence[Tensor], Sequence[Tensor], CopyUnderWay] | None) -> None:
    if full is not None:
        targets, parts, in_progress = full
        in_progress.wait()
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)


def _batches(
    pairs: Sequence[tuple[Tensor, Tensor]], batch_bytes: int
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    batch: list[tuple[Tensor, Tensor]] = []
    free_bytes = batch_bytes
    for target, source in pairs:
        written, read = as_bytes(target), as_bytes(source.detach().contiguous())
        start = 0
        while start < len(read):
            stop = min(start + free_bytes, len(read))
            batch.append((written[start:stop], read[start:stop]))
            free_bytes -= stop - start
            start = stop
            if not free_bytes:
                yield batch
                batch, free_bytes = [], batch_bytes
    if batch:
        yield batch


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def state_dict_on_host(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own state_dict, copied into host memory; a tied tensor is copied once."""
    copies: dict[int, Any] = {}
    for tensor in (held := model.state_dict(keep_vars=True)).values():
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor)
    return {name: copies[id(tensor)] for name, tensor in held.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    # The result of a module's get_extra_state.
    return copy.deepcopy(value)
