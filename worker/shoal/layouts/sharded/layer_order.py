"""Announcement of each gathering and reduction before ranks run it over Gloo.

Nothing in a message says whose rows it carries. If a rank leaves a layer out, the others' next
gathering is given rows of another layer, and Gloo ends the process (SIGABRT) of a rank that is
sent more than it expects.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shoal.backends.abortable.gather import meet_after_collective
from shoal.backends.abortable.waiter import wait_abortable
from shoal.layouts.layer_exchanges import LayerExchanges
from shoal_proto.errors import InvalidSpec

PASSES_END = -1
"""Stands for an operation: the end of forward passes that no meeting of ranks follows."""


def to_gather(number: int) -> int:
    """Return the operation that gathers the weights of this group of parameters."""
    return 2 * number


def to_sum(number: int) -> int:
    """Return the operation that sums the gradients of this group of parameters."""
    return 2 * number + 1


class LayerOrder:
    """Check of one rank. All ranks of the group call the same methods in the same order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        tell: Callable[[InvalidSpec], None] = lambda refusal: None,
    ) -> None:
        """`names`: of the groups of parameters, by their numbers. `tell`: see
        `LayerExchanges.report_refusal`."""
        self._group, self._names, self._tell = group, names, tell

    def check(self, exchange: int) -> None:
        """Collective: return if all ranks are about to run this operation. Raises InvalidSpec, on
        all ranks, if they are not.

        Each rank sends its operation to each other rank, which takes one message latency: a ring
        takes one for each rank.
        """
        own = torch.full((self._group.size(),), exchange, dtype=torch.int64)
        words = torch.empty_like(own)
        work = dist.all_to_all_single(words, own, group=self._group, async_op=True)
        wait_abortable(work, self._group)
        deeds = words.tolist()
        if len(set(deeds)) > 1:
            meet_after_collective(self._group)
            ranks = dist.get_process_group_ranks(self._group)
            refusal = different_layers(ranks, deeds, self._names)
            self._tell(refusal)
            raise refusal


class NotedOrder:
    """Variant of `LayerOrder` for devices, whose stream a message before each collective would hold
    up: collectives are recorded, and compared by a rank that has waited for long.
    """

    def __init__(self, exchanges: LayerExchanges, names: Sequence[str]) -> None:
        """`names`: names of the groups of parameters, by their numbers."""
        self._sites = [exchanges.site(f"the layer of {name}", what="weights") for name in names]

    def check(self, exchange: int) -> None:
        """Note that the rank is about to do this."""
        if exchange == PASSES_END:
            return  # noted with the passes
        number, is_sum = divmod(exchange, 2)
        site = self._sites[number]
        if is_sum:
            site.gradient()
        else:
            site.value()


def different_layers(
    ranks: Sequence[int], deeds: Sequence[int], names: Sequence[str]
) -> InvalidSpec:
    """The refusal of what these ranks are about to do, or did last."""
    said = zip(ranks, deeds, strict=True)
    return InvalidSpec(
        "the members computed with different layers at the same time",
        seen="; ".join(f"rank {rank}: {_in_words(exchange, names)}" for rank, exchange in said),
        expected="the same layers in the same order in each pass on every member: they gather"
        " and reduce these together",
        fix="Call a layer that a member's samples do not need with none of them (inputs[:0]),"
        " and, where gradients are computed, add its sum to the loss; or use"
        " shoal.DDP(find_unused_parameters=True) or shoal.Zero1(find_unused_parameters=True).",
    )


def _in_words(exchange: int, names: Sequence[str]) -> str:
    if exchange == PASSES_END:
        return "done with its forward passes"
    number, is_sum = divmod(exchange, 2)
    name = names[number] if number < len(names) else str(number)
    return f"at the {'gradients' if is_sum else 'weights'} of the layer of {name}"
