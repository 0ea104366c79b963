"""What all ranks are to hear before any of them leaves."""

from collections.abc import Callable

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable

log = structlog.get_logger(__name__)


def let_all_hear(group: dist.ProcessGroup) -> None:
    """Return once every rank has what the last collective of the group told it."""

    def meet() -> None:
        wait_abortable(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)

    meet_before_leaving(meet, RuntimeError)


def meet_before_leaving(meet: Callable[[], object], if_cut: type[Exception]) -> None:
    """Return once every rank has what it was told, behind one more meeting of all. `if_cut`: what
    `meet` raises where a rank has left.

    Whoever raises leaves, and that cuts the group under those who have not heard yet: they would
    take it for a loss, and train on without the others.
    """
    try:
        meet()
    except if_cut as error:
        # Who came through this before has left already, so all have heard.
        log.info("last_word_ended_by_a_leaver", reason=str(error)[:200])
