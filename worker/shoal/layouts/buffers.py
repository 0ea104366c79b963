"""Buffers that ranks compute from their own samples, such as running means."""

from collections.abc import Callable, Iterator, Sequence

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.backends.abortable.waiter import wait_abortable
from shoal.state.host_copies import as_bytes
from shoal.torch_private.modules import buffer_table, has_batch_statistics, transient_buffers
from shoal.torch_private.tensors import foreach_copy_

log = structlog.get_logger(__name__)

FIRST_STEPS = 3
"""Number of steps in which buffers are compared: more than one, as buffers may still have their
initial values in the first step."""


class BuffersBySamples:
    """Detector of buffers that members compute from their own samples.

    All members take the first member's values, so the model depends on the number of members.
    BatchNorm's buffers are left out: see docs/strategies.md.
    """

    def __init__(self, model: nn.Module) -> None:
        self._num_shared = 0
        self._tables = {
            f"{path}.{name}" if path else name: (buffer_table(part), name)
            for path, part in model.named_modules()
            if not has_batch_statistics(part)
            for name in buffer_table(part).keys() - transient_buffers(part)
        }

    @property
    def is_early(self) -> bool:
        """True while values are compared."""
        return bool(self._tables) and self._num_shared < FIRST_STEPS

    def compare_buffers(self, own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Compare this member's values with the first member's."""
        self._num_shared += 1
        first = {id(one): other for one, other in zip(own, given, strict=True)}
        present = ((name, table.get(key)) for name, (table, key) in self._tables.items())
        differing = [
            name
            for name, one in present
            if one is not None and id(one) in first and _differs(one, first[id(one)])
        ]
        if differing:
            self._num_shared = FIRST_STEPS
            log.warning(
                "buffers_depend_on_members",
                buffers=", ".join(differing[:5]),
                seen="each member's forward passes compute them from its own samples, and then all"
                " take the first member's values: the result depends on the number of members",
                hint="compute a queue or a statistic of all samples between two steps, with"
                " session.all_reduce",
            )


class RunningBuffers:
    """The persistent buffers of a replicated model.

    DDP broadcasts the first rank's buffers only in the next forward pass: if that rank were lost
    before, the job would continue with other values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_samples = BuffersBySamples(model)
        # Walking over all modules takes longer than sending a few buffers.
        self._tables = [
            (buffer_table(part), transient_buffers(part))
            for part in model.modules()
            if buffer_table(part)
        ]

    def broadcast_buffers(self, group: dist.ProcessGroup) -> None:
        """Broadcast the first rank's buffers. Collective, unless there are none."""
        if self._tables and group.size() > 1 and (buffers := list(self._each_once())):
            is_early = self._by_samples.is_early
            broadcast_packed(buffers, group, self._by_samples.compare_buffers if is_early else None)

    def _each_once(self) -> Iterator[Tensor]:
        known: set[int] = set()
        for table, transient in self._tables:
            for name, buffer in table.items():
                if buffer is not None and name not in transient and id(buffer) not in known:
                    known.add(id(buffer))
                    yield buffer


def _differs(one: Tensor, other: Tensor) -> bool:
    if one.dtype.is_floating_point:
        return not torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
    return not torch.equal(one, other)


@torch.no_grad()
def broadcast_packed(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    look: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None = None,
) -> None:
    """Overwrite the tensors with those of the group's first rank, in one broadcast. Calls
    `look(own, first)` before it overwrites them."""
    packed = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])
    wait_abortable(dist.broadcast(packed, group=group, group_src=0, async_op=True), group)
    parts = torch.split(packed, [tensor.nbytes for tensor in tensors])
    given = list(map(_as, parts, tensors))
    if look is not None:
        look(tensors, given)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [(own, new) for own, new in zip(tensors, given, strict=True) if own.dtype == dtype]
        foreach_copy_([own for own, _ in alike], [new for _, new in alike])


def _as(part: Tensor, tensor: Tensor) -> Tensor:
    is_aligned = part.storage_offset() % tensor.element_size() == 0
    return (part if is_aligned else part.clone()).view(tensor.dtype).view(tensor.shape)


class BuffersAside:
    """Copy of a model's buffers, persistent or not."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (table, name, buffer, buffer.detach().clone())
            for part in model.modules()
            for table in [buffer_table(part)]
            for name, buffer in table.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the contents, and buffers that a module has replaced. Unchanged buffers are not
        written to."""
        for table, name, buffer, before in self._kept:
            table[name] = buffer
            if not torch.equal(buffer, before):
                buffer.copy_(before)
