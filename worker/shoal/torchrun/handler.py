"""torchrun's rendezvous interface on a Shoal coordinator."""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from shoal.membership.draining import drained
from shoal.torchrun.config import BACKEND, NodeConfig
from shoal.torchrun.node import Node, shares_store
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    JobFinished,
    MemberDrained,
    NotLeader,
    ShoalError,
    Unavailable,
)


class ShoalRendezvousHandler(RendezvousHandler):
    """Rendezvous handler of one agent. `num_nodes_waiting` calls no coordinator."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # torchrun does not shut the handler down when a signal ends the agent, or when it drops the
        # handler.
        self._leave_at_exit = partial(_leave_at_exit, node, os.getpid())
        atexit.register(self._leave_at_exit)
        dropped = weakref.finalize(self, _leave_dropped, node, self._leave_at_exit)
        dropped.atexit = False

    @classmethod
    def joined(cls, parameters: RendezvousParameters) -> "ShoalRendezvousHandler":
        """Join the job and return the handler; see `shoal.torchrun` for its errors."""
        with _torchrun_errors(connecting=True):
            node = Node(NodeConfig.read(parameters))
            node.attend()
        return cls(node)

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._node.job

    @property
    def use_agent_store(self) -> bool:
        """True if rank 0's agent holds the workers' store, which serves one generation only."""
        return shares_store()

    def next_rendezvous(self) -> RendezvousInfo:
        """Enter the next generation.

        Raises Drained, which ends the agent, if this node was asked to leave; else
        RendezvousClosedError, RendezvousTimeoutError or another RendezvousError.
        """
        if self._node.is_closed:
            raise RendezvousClosedError(f"job {self._node.job} is over for this node")
        with drained(), self._leaving_drained(), _torchrun_errors():
            entry = self._node.enter()
        return RendezvousInfo(entry.store, entry.rank, entry.world_size, entry.bootstrap)

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes; above 0 also if the generation is over."""
        return self._node.num_waiting()

    def is_closed(self) -> bool:
        return self._node.is_closed

    def set_closed(self) -> None:
        """Close the job to new nodes and new generations. The nodes that train continue.

        Raises RendezvousTimeoutError or RendezvousConnectionError if no coordinator answers.
        """
        with _torchrun_errors():
            self._node.close("a node closed the rendezvous")

    def shutdown(self) -> bool:
        """Leave the job; this node's work counts as completed unless an exception ends the agent.

        The job completes with the last of its nodes. Returns False if no coordinator was notified.
        """
        # torchrun calls this in a `finally`, and does not say how the agent ended.
        error = sys.exception()
        if error is None:
            return self._leave(completed=True, reason="all its workers are done")
        return self._leave(completed=False, reason=f"{type(error).__name__}: {error}")

    def _leave(self, *, completed: bool, reason: str) -> bool:
        atexit.unregister(self._leave_at_exit)
        return self._node.leave(completed=completed, reason=reason)

    @contextmanager
    def _leaving_drained(self) -> Iterator[None]:
        """Leave without completing the job if this node is drained: other nodes continue it."""
        try:
            yield
        except MemberDrained as error:
            self._leave(completed=False, reason=f"drained: {error.seen}")
            raise


def _leave_at_exit(node: Node, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        node.leave(completed=False, reason="its agent ended")


def _leave_dropped(node: Node, at_exit: Callable[[], None]) -> None:
    """Leave the job, on a new thread, as any thread may collect garbage."""
    atexit.unregister(at_exit)
    threading.Thread(target=at_exit, name="shoal-leave", daemon=True).start()


@contextmanager
def _torchrun_errors(*, connecting: bool = False) -> Iterator[None]:
    try:
        yield
    except ShoalError as error:
        if isinstance(error, (InvalidSpec, MemberDrained)):
            raise
        raise _kind_of(error, connecting=connecting)(str(error)) from error


def _kind_of(error: ShoalError, *, connecting: bool) -> type[RendezvousError]:
    if isinstance(error, JobFinished):
        return RendezvousClosedError
    if isinstance(error, (Unavailable, NotLeader)):
        return RendezvousConnectionError
    if isinstance(error, DeadlineExceeded):
        return RendezvousConnectionError if connecting else RendezvousTimeoutError
    return RendezvousStateError
