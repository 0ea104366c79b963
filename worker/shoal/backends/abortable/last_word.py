"""What all ranks are to hear before any of them leaves."""

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable

log = structlog.get_logger(__name__)


def let_all_hear(group: dist.ProcessGroup) -> None:
    """Return once every rank has what the last collective told it.

    Whoever raises leaves, and that cuts the group under those who have not heard yet: they would
    take it for a loss, and train on without the others.
    """
    try:
        wait_abortable(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)
    except RuntimeError as error:
        # Who came through this before has left already, so all have heard.
        log.info("last_word_ended_by_a_leaver", reason=str(error)[:200])
