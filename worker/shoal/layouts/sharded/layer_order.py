"""Checks that all ranks run the same all-gathers and reductions: over Gloo before each operation,
on a device once a rank has waited for a long time. Otherwise ranks would receive rows of another
layer, or end (SIGABRT)."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shoal.backends.abortable.gather import barrier_after_collective
from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.layer_exchanges import PASSES_END, LayerExchanges
from shoal_proto.errors import InvalidSpec


def gather_number(number: int) -> int:
    """Number of the operation that gathers this group's weights."""
    return 2 * number


def sum_number(number: int) -> int:
    """Number of the operation that sums this group's gradients."""
    return 2 * number + 1


class LayerOrder:
    """Order check by messages before each operation."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        report_refusal: Callable[[InvalidSpec], None],
    ) -> None:
        """`names`: names of the parameter groups, by number. `report_refusal`: see
        `LayerExchanges`."""
        self._group, self._names, self._report_refusal = group, names, report_refusal

    def check(self, exchange: int) -> None:
        """Raise InvalidSpec, on all ranks, unless all are about to run this operation.
        Collective."""
        own = torch.full((self._group.size(),), exchange, dtype=torch.int64)
        exchanged = torch.empty_like(own)
        work = dist.all_to_all_single(exchanged, own, group=self._group, async_op=True)
        wait_abortable(work, self._group)
        operations = exchanged.tolist()
        if len(set(operations)) > 1:
            barrier_after_collective(self._group)
            ranks = dist.get_process_group_ranks(self._group)
            refusal = different_operations(ranks, operations, self._names)
            self._report_refusal(refusal)
            raise refusal


class RecordedOrder:
    """Order check by records, for devices: a message before each collective would stall the
    device's stream."""

    def __init__(self, exchanges: LayerExchanges, names: Sequence[str]) -> None:
        """`names`: names of the parameter groups, by number."""
        self._sites = [exchanges.add_site(f"the layer of {name}", what="weights") for name in names]

    def check(self, exchange: int) -> None:
        """Record that the rank is about to run this operation."""
        if exchange == PASSES_END:
            return  # recorded by `LayerExchanges`
        number, is_sum = divmod(exchange, 2)
        site = self._sites[number]
        if is_sum:
            site.gradient()
        else:
            site.value()


def different_operations(
    ranks: Sequence[int], operations: Sequence[int], names: Sequence[str]
) -> InvalidSpec:
    """Build the refusal for ranks with different operations. `operations`: each rank's next or last
    one."""
    by_rank = zip(ranks, operations, strict=True)
    return InvalidSpec(
        "the members computed with different layers at the same time",
        seen="; ".join(f"rank {rank}: {_text(exchange, names)}" for rank, exchange in by_rank),
        expected="the same layers in the same order in each pass on every member: they gather"
        " and reduce each layer together",
        fix="If a member's samples do not need a layer, call it with no samples (inputs[:0]) and,"
        " in training, add the sum of its outputs to the loss; or use"
        " shoal.DDP(find_unused_parameters=True) or shoal.Zero1(find_unused_parameters=True).",
    )


def _text(exchange: int, names: Sequence[str]) -> str:
    if exchange == PASSES_END:
        return "done with its forward passes"
    number, is_sum = divmod(exchange, 2)
    name = names[number] if number < len(names) else str(number)
    return f"at the {'gradients' if is_sum else 'weights'} of the layer of {name}"
