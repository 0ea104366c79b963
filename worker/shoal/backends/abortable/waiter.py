"""Where a trainer waits for collectives, so that it can be let through when one does not end."""

import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.process_group.transports import can_be_cut

Completion = torch.futures.Future[str]
"""What a waiting thread is let through: the reason if what it waited for has failed, or ""."""


@dataclass(frozen=True)
class Underway:
    """A collective that has begun."""

    work: dist.Work
    completion: Completion

    def wait(self) -> None:
        """Return when it has ended; raises RuntimeError if it failed or was aborted.

        NCCL's work is complete as soon as it is begun, and its result is not there yet: only behind
        `work.wait()` does the stream of this thread compute with it.
        """
        reason = self.completion.wait()
        if reason:
            raise RuntimeError(reason)
        self.work.wait()


class AbortableWaiter:
    """Waits for the work of a group, with completions of our own in between.

    A write to a connection that was just reset can leave Gloo waiting for as long as a collective
    may take, with nothing left to shut down. `abort` ends these waits, and the trainer goes on
    without that thread.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, for_good: bool = False) -> None:
        """`for_good`: what is begun after an abort is aborted as well."""
        self._for_good = for_good
        self._aborted = ""
        self._lock = threading.Lock()
        self._pending: list[Completion] = []
        self.num_ended = 0
        """Of all waits so far. Any thread."""
        if group is not None:
            self.attach(group)

    def attach(self, group: dist.ProcessGroup) -> None:
        """Be among those that `waiters_of` finds for this group."""
        whole = _whole(group)
        with _lock:
            _by_group.setdefault(whole, weakref.WeakSet()).add(self)

    def wait(self, work: dist.Work | None) -> None:
        """Return when the collective has ended; raises RuntimeError if it failed."""
        assert work is not None, "asked for asynchronously, by a rank of the group"
        underway = self.begin(work)
        try:
            underway.wait()
        finally:
            self.forget()

    def begin(self, work: dist.Work) -> "Underway":
        """The collective, to be waited for later, behind others of the same trainer."""
        return Underway(work, self.completion_of(work))

    @property
    def is_waiting(self) -> bool:
        """Whether anything is still on its way. Any thread."""
        return bool(self.pending())

    def pending(self) -> list[Completion]:
        """What is on its way. Any thread."""
        return [completion for completion in list(self._pending) if not completion.done()]

    def abort(self, reason: str) -> None:
        """Let nobody wait for Gloo any longer. Any thread."""
        if self._for_good:
            # First: whoever begins something now is not seen below.
            self._aborted = f"given up between two collectives: {reason}"
        for completion in list(self._pending):
            self.complete(completion, f"gloo did not end what it did before the cut: {reason}")

    def new_completion(self) -> Completion:
        """One more thing that the trainer may wait for. `complete` sets it."""
        completion: Completion = torch.futures.Future()
        self._pending.append(completion)
        if self._aborted:
            self.complete(completion, self._aborted)
        return completion

    def completion_of(self, work: dist.Work) -> Completion:
        """What is set when the collective has ended, well or not."""
        completion = self.new_completion()
        work.get_future().add_done_callback(partial(self._finished, completion))
        return completion

    def _finished(self, completion: Completion, future: torch.futures.Future[Any]) -> None:
        """Gloo's thread is done with a collective."""
        try:
            future.value()
            reason = ""
        except RuntimeError as error:
            # Empty would say that it went well.
            reason = str(error) or "a collective failed without a reason"
        self.complete(completion, reason)

    def complete(self, completion: Completion, reason: str) -> None:
        """Let go of whoever waits; `reason`: why it failed, or empty. Any thread."""
        with self._lock:
            if not completion.done():
                self.num_ended += 1
                completion.set_result(reason)

    def forget(self) -> None:
        """What was waited for is over."""
        self._pending.clear()


_lock = threading.Lock()
_by_group: weakref.WeakKeyDictionary[Any, weakref.WeakSet[AbortableWaiter]] = (
    weakref.WeakKeyDictionary()
)
_default: weakref.WeakKeyDictionary[Any, AbortableWaiter] = weakref.WeakKeyDictionary()
_wholes: weakref.WeakKeyDictionary[Any, "weakref.ref[Any]"] = weakref.WeakKeyDictionary()


def wait_abortable(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Return when a collective of the group has ended, which was begun with `async_op=True`.

    Raises RuntimeError if it failed, or if it was given up with the group's waiters. For the
    trainer's thread.
    """
    assert work is not None, "asked for asynchronously, by a rank of the group"
    if not can_be_cut(group):
        work.wait()
        return
    whole = _whole(group)
    with _lock:
        waiters = _default.get(whole)
    if waiters is None:
        waiters = AbortableWaiter(whole)
        with _lock:
            _default[whole] = waiters
    waiters.wait(work)


def waiters_of(group: dist.ProcessGroup) -> list[AbortableWaiter]:
    """The waiters of this group and of the groups made within it."""
    with _lock:
        return list(_by_group.get(group, ()))


def add_subgroup(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Let the waiters of a group that was made within another be found with that one's."""
    if group is not whole:
        with _lock:
            _wholes[group] = weakref.ref(whole)


def _whole(group: dist.ProcessGroup) -> dist.ProcessGroup:
    with _lock:
        found = _wholes.get(group)
    whole: dist.ProcessGroup | None = found() if found is not None else None
    return group if whole is None else whole
