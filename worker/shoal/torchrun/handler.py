"""torchrun's rendezvous interface on a Shoal coordinator."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
from shoal.torchrun.node import Node
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
    """One agent's view of the job. `num_nodes_waiting` is free to call: it asks nobody."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._process = os.getpid()

    @classmethod
    def joined(cls, parameters: RendezvousParameters) -> "ShoalRendezvousHandler":
        """A handler whose node the coordinator has admitted; see `shoal.torchrun`."""
        node = Node(NodeConfig.read(parameters))
        with _torchrun_errors(connecting=True):
            node.attend()
        handler = cls(node)
        # torchrun does not shut the handler down when a signal ends the agent: the others should
        # not have to find out by this node's silence.
        atexit.register(handler._leave_at_exit)
        return handler

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._node.job

    @property
    def use_agent_store(self) -> bool:
        """Always: rank 0's agent holds the workers' store, of one generation only."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The next generation. Raises Drained, which ends the agent, if this node is to leave."""
        if self._node.is_closed:
            raise RendezvousClosedError(f"job {self._node.job} is over for this node")
        with drained(), self._leaving_drained(), _torchrun_errors():
            entry = self._node.enter()
        return RendezvousInfo(entry.store, entry.rank, entry.world_size, entry.bootstrap)

    def num_nodes_waiting(self) -> int:
        """Above 0 also when the generation lost a node, so that the agent re-forms at once."""
        return self._node.num_waiting()

    def is_closed(self) -> bool:
        return self._node.is_closed

    def set_closed(self) -> None:
        """Complete the job for all nodes."""
        self._leave(completed=True, reason="a node closed the rendezvous")

    def shutdown(self) -> bool:
        """Complete the job, or, on the way out of a failed agent, leave it to the other nodes."""
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
        """Other nodes have taken over: shutting down must not complete the job for them."""
        try:
            yield
        except MemberDrained as error:
            self._leave(completed=False, reason=f"drained: {error.seen}")
            raise

    def _leave_at_exit(self) -> None:
        if os.getpid() == self._process:  # and no process that it has forked
            self._node.leave(completed=False, reason="its agent ended")


@contextmanager
def _torchrun_errors(*, connecting: bool = False) -> Iterator[None]:
    """Shoal's errors under the names that torchrun documents for its interface."""
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
