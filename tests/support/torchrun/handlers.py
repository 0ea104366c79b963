"""Use of a rendezvous handler as by torchrun's agent, without its workers."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)

PATIENCE_S = 40.0

Join = Callable[..., RendezvousHandler]


def parameters(
    endpoint: str, run_id: str, nodes: tuple[int, int] = (1, 2), **conf: str
) -> RendezvousParameters:
    return RendezvousParameters("shoal", endpoint, run_id, *nodes, **conf)


def together(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """Ask all handlers for their next rendezvous at the same time."""
    with ThreadPoolExecutor(len(handlers)) as threads:
        return list(threads.map(lambda handler: handler.next_rendezvous(), handlers))


def await_change(handler: RendezvousHandler, at_least: int = 1) -> int:
    """Poll as torchrun's agent does, until this many nodes wait. Returns their number."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (num_waiting := handler.num_nodes_waiting()) < at_least:
        assert time.monotonic() < deadline_s, "no change was seen"
        time.sleep(0.02)  # torchrun's interface can only be polled
    return num_waiting


__all__ = ["PATIENCE_S", "Join", "await_change", "parameters", "together"]
