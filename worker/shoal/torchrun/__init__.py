"""`torchrun --rdzv-backend=shoal`: the coordinator is the rendezvous; see docs/torchrun.md."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    Creator = Callable[[RendezvousParameters], RendezvousHandler]


def backend() -> "Creator":
    """Return the function that makes a handler, as torchrun expects of its plug-ins."""
    return create_handler


def create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    """Return a handler that has already joined the job.

    Raises InvalidSpec for invalid options, RendezvousConnectionError if no coordinator answers,
    RendezvousClosedError if the job is finished, MemberDrained if the node is asked to leave before
    it has joined, and RendezvousStateError for other refusals.
    """
    # Imported late: torchrun loads every plug-in at every start, whatever the backend.
    from shoal.torchrun.handler import ShoalRendezvousHandler  # noqa: PLC0415

    return ShoalRendezvousHandler.joined(parameters)
