"""The group of the generation that a member is in: connected, cut by any thread, let go of."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable, waiters_of
from shoal.backends.process_group.interface import LONGEST_S, Backend, Group, Seat
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.rooms import KeptRooms
from shoal.membership.alone import LoneStore
from shoal.membership.generation import Context, Generation
from shoal.membership.rendezvous_store import RendezvousStore
from shoal.membership.step_messages import all_know_present
from shoal_client.connection.coordinators import Coordinators
from shoal_proto.errors import InternalError, NonFiniteGradient

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
STUCK_AFTER_S = 1.0
"""A collective of a group that is cut ends within milliseconds, or (Gloo) only at its limit."""


class GenerationGroup:
    """One at a time. All methods but `cut` are the trainer's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut_up_to = 0
        self.number = 0
        """Of the generation that was connected last."""
        self._group: Group | None = None
        self._opened: dist.ProcessGroup | None = None
        """Also while what trains over it is brought up."""
        self.kept_rooms = KeptRooms()
        """Memory that its members had in common, for those of the next one."""

    def connect(
        self,
        backend: Backend,
        coordinators: Coordinators | None,
        generation: Generation,
        context: Context,
    ) -> Group:
        """The group of a generation, not opened yet; cut already if its generation is over.

        Without coordinators it is that of a member which trains alone.
        """
        me = generation.me
        peers = generation.record.roster.entries
        watched, limits = backend.is_watched, context.limits
        one_host = len({(entry.host, entry.address) for entry in peers}) == 1
        seat = Seat(
            generation=generation.number,
            rank=generation.rank,
            world_size=generation.world_size,
            address=LOOPBACK if one_host else me.address,
            bring_up_s=LONGEST_S if watched else limits.bring_up_s,
            collective_s=LONGEST_S if watched else limits.collective_s,
            tells_compactly=all_know_present(generation.record.roster),
        )
        store = (
            LoneStore()
            if coordinators is None
            else RendezvousStore(
                coordinators,
                generation.token,
                timeout_s=seat.bring_up_s,
                shared_directory=context.shared_directory,
            )
        )
        with self._lock:
            self._group = group = backend.group(seat, store)
            self.number = generation.number
            over = self._cut_up_to >= generation.number
        if over:
            group.cut(f"generation {generation.number} is over")
        return group

    def open(self, group: Group) -> dist.ProcessGroup:
        """Its collectives, once all members are there."""
        self._opened = opened = group.open()
        return opened

    def check(self) -> None:
        """See `Group.check`."""
        group = self._group
        if group is not None:
            group.check()

    @contextmanager
    def judging(self) -> Iterator[None]:
        """What is found not finite within, where the group was cut, is what an aborted message left
        and nobody's fault: raises as `check` in place of NonFiniteGradient."""
        try:
            yield
        except NonFiniteGradient:
            self.check()
            raise

    @property
    def is_connected(self) -> bool:
        """Whether there is a group that was not let go of."""
        return self._group is not None

    def has_cut(self, generation: int) -> bool:
        """Whether the generation is over."""
        return self._cut_up_to >= generation

    def cut(self, generation: int) -> None:
        """Make whatever waits in the group raise, unless it is a later generation's. Any thread."""
        with self._lock:
            self._cut_up_to = max(self._cut_up_to, generation)
            group = self._group if self.number <= generation else None
        if group is not None:
            reason = f"generation {generation} is over"
            group.cut(reason)
            self._watch_for_stuck(group, reason)

    def _watch_for_stuck(self, group: Group, reason: str) -> None:
        """Free the trainer if Gloo does not end what it was doing, though its group is cut."""

        def abort() -> None:
            with self._lock:
                opened = self._opened if self._group is group else None
            stuck = [one for one in waiters_of(opened) if one.is_waiting] if opened else []
            if stuck:
                log.warning("collective_stuck", reason=reason)
                group.keep_for_ever()
            for waiter in stuck:
                waiter.abort(reason)

        timer = threading.Timer(STUCK_AFTER_S, abort)
        timer.daemon = True
        timer.start()

    def release(self) -> None:
        """Let go of the group, if there is one."""
        self._opened = None
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.retire()


def check_same_step(
    generation: int, step: int, group: dist.ProcessGroup, memory: SharedMemory | None = None
) -> None:
    """Collective: raise InternalError unless all members of the generation stand at this step.
    `memory`: they share it."""
    if memory is not None:
        found = list(memory.meet(step))
    else:
        steps = torch.zeros(group.size(), dtype=torch.int64)
        steps[group.rank()] = step
        wait_abortable(dist.all_reduce(steps, group=group, async_op=True), group)
        found = steps.tolist()
    if len(set(found)) != 1:
        raise InternalError(
            f"the members of generation {generation} are at different steps",
            seen=f"{found} by rank",
        )
