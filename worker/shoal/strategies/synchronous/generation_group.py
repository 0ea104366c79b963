"""The group of a member's generation: connected by the trainer, cut by any thread."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.gather import gather_rows
from shoal.backends.abortable.waiter import waiters_of
from shoal.backends.process_group.interface import LONGEST_S, Backend, Group, Seat
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.regions import KeptRegions
from shoal.membership.generation import Context, Generation
from shoal_proto.errors import InternalError, NonFiniteGradient

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
STUCK_AFTER_S = 1.0
"""Time that a collective has to end after a cut. Later it counts as stuck: some of Gloo's
collectives end only at their time limit."""
WARNED_AFTER_S = 10.0


class GenerationGroup:
    """The present group; one at a time. Not thread-safe, except `cut` and `has_cut`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut_up_to = 0
        self.number = 0
        self._group: Group | None = None
        self._opened: dist.ProcessGroup | None = None
        self.kept_regions = KeptRegions()
        self._trainer = 0
        self._released = threading.Event()
        self._judging = _Judging(self.check)
        self._freeing: Group | None = None

    def connect(self, backend: Backend, generation: Generation, context: Context) -> Group:
        """Make a generation's group, not open yet, and keep it as the present one. Called by the
        trainer.

        The group is cut already if the generation is over.
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
        )
        store = context.stores.open(generation.token, seat.bring_up_s, once_a_host=True)
        with self._lock:
            self._group = group = backend.group(seat, store)
            self.number = generation.number
            self._trainer, self._released = threading.get_ident(), threading.Event()
            is_over = self._cut_up_to >= generation.number
        if is_over:
            group.cut(f"generation {generation.number} is over")
        return group

    def open(self, group: Group) -> dist.ProcessGroup:
        """Wait for all members, and return the process group. Raises what `Group.open` raises."""
        self._opened = opened = group.open()
        return opened

    def check(self) -> None:
        """See `Group.check`."""
        group = self._group
        if group is not None:
            group.check()

    def judging(self) -> AbstractContextManager[None]:
        """Return a context that replaces NonFiniteGradient by the error of `check` if the group was
        cut.
        """
        return self._judging

    @property
    def is_connected(self) -> bool:
        """True if there is a group that was not released."""
        return self._group is not None

    def has_cut(self, generation: int) -> bool:
        """True if this generation is over: it, or a later one, was cut."""
        return self._cut_up_to >= generation

    def cut(self, generation: int) -> None:
        """Make waits in the group raise, unless the group is a later generation's. Thread-safe."""
        with self._lock:
            self._cut_up_to = max(self._cut_up_to, generation)
            group = self._group if self.number <= generation else None
            first = group is not None and group is not self._freeing
            self._freeing, released = group or self._freeing, self._released
        if group is None:
            return
        reason = f"generation {generation} is over"
        group.cut(reason)
        if first:
            threading.Thread(
                target=self._free_trainer,
                args=(group, released, reason),
                name="shoal-free-trainer",
                daemon=True,
            ).start()

    def _free_trainer(self, group: Group, released: threading.Event, reason: str) -> None:
        """Abort waits that Gloo does not end after a cut, until the trainer has released the
        group.
        """
        cut_s, is_warned = time.monotonic(), False
        while not released.wait(STUCK_AFTER_S):
            self._abort_stuck(group, reason)
            waited_s = time.monotonic() - cut_s
            if waited_s > WARNED_AFTER_S and not is_warned:
                is_warned = True
                log.warning(
                    "trainer_has_not_stopped",
                    reason=reason,
                    waited_s=round(waited_s, 1),
                    stack=stack_of(self._trainer),
                )

    def _abort_stuck(self, group: Group, reason: str) -> None:
        with self._lock:
            opened = self._opened if self._group is group else None
        stuck = [one for one in waiters_of(opened) if one.pending()] if opened else []
        if stuck:
            log.warning("collective_stuck", reason=reason)
            group.keep_for_ever()
        for waiter in stuck:
            waiter.abort(reason)

    def release(self) -> None:
        self._opened = None
        with self._lock:
            group, self._group, self._freeing = self._group, None, None
            self._released.set()
        if group is not None:
            group.retire()


class _Judging:
    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, NonFiniteGradient):
            self._check()


def stack_of(thread: int) -> str:
    """Return the stack of a thread, without values of variables, as these include tokens."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"


def check_same_step(
    generation: int, step: int, group: dist.ProcessGroup, memory: SharedMemory | None = None
) -> None:
    """Raise InternalError unless all members of the generation are at this step. Collective.

    `memory`: memory that the members share, used in place of the group.
    """
    if memory is not None:
        by_rank = list(memory.gather_words(step))
    else:
        by_rank = gather_rows(torch.tensor(step), group).tolist()
    if len(set(by_rank)) != 1:
        raise InternalError(
            f"the members of generation {generation} are at different steps",
            seen=f"{by_rank} by rank",
        )
