"""Waits of a trainer for its collectives; another thread can abort these waits."""

import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.process_group.transports import can_be_cut

Completion = torch.futures.Future[str]
"""Future that ends a wait, with the reason if the work failed, else ""."""


class WaitingTime(threading.local):
    """Total time that each thread has waited for other ranks or servers. Contexts do not nest."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began_s


waiting = WaitingTime()


@dataclass(frozen=True)
class OngoingCollective:
    """A collective that has begun."""

    work: dist.Work
    completion: Completion

    def wait(self) -> None:
        """Wait for the end of the collective. Raises DistBackendError if it failed or was aborted.

        NCCL's work completes before its result is computed. Only `work.wait()` makes the stream of
        this thread wait for the result.
        """
        with waiting:
            reason = self.completion.wait()
        if reason:
            # Every backend recognises this class as a failure of the group.
            raise dist.DistBackendError(reason)
        self.work.wait()


class AbortableWaiter:
    """Waiter for the collectives of a group. Each wait ends with the collective, or by `abort`.
    (After a write to a connection that was just reset, Gloo may wait until the time limit.)"""

    def __init__(self, group: dist.ProcessGroup | None = None, *, for_good: bool = False) -> None:
        """`for_good`: waits that begin after an abort are aborted too."""
        self._for_good = for_good
        self._aborted = ""
        self._lock = threading.Lock()
        self._pending: list[Completion] = []
        self.num_ended = 0
        """Number of ended waits. Any thread may read it."""
        if group is not None:
            self.attach(group)

    def attach(self, group: dist.ProcessGroup) -> None:
        """Register this waiter for `waiters_of`."""
        whole = _whole(group)
        with _lock:
            _by_group.setdefault(whole, weakref.WeakSet()).add(self)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for the collective. Raises DistBackendError if it failed or was aborted."""
        assert work is not None, "begun with async_op=True, by a rank of the group"
        ongoing = self.track(work)
        try:
            ongoing.wait()
        finally:
            self.forget()

    def track(self, work: dist.Work) -> "OngoingCollective":
        """Return an object to wait later for a collective that has begun. Other collectives may
        begin before that wait."""
        return OngoingCollective(work, self.completion_of(work))

    def pending(self) -> list[Completion]:
        """Return the completions that are not set yet. Thread-safe."""
        return [completion for completion in list(self._pending) if not completion.done()]

    def abort(self, reason: str) -> None:
        """End all present waits, and with `for_good` later ones too. Thread-safe."""
        if self._for_good:
            # Set first: the loop below does not see waits that another thread begins.
            self._aborted = f"the group was cut between two collectives: {reason}"
        for completion in list(self._pending):
            # For an error in a hook of DDP, torch drops the class: backends then look for "gloo" in
            # the text.
            self.complete(completion, f"gloo did not end the operation before the cut: {reason}")

    def new_completion(self) -> Completion:
        """Make a completion for the trainer to wait for."""
        completion: Completion = torch.futures.Future()
        self._pending.append(completion)
        if self._aborted:
            self.complete(completion, self._aborted)
        return completion

    def completion_of(self, work: dist.Work) -> Completion:
        """Return a completion that is set when the collective has ended."""
        completion = self.new_completion()
        work.get_future().add_done_callback(partial(self._finished, completion))
        return completion

    def _finished(self, completion: Completion, future: torch.futures.Future[Any]) -> None:
        """Called by Gloo's thread when a collective has ended."""
        try:
            future.value()
            reason = ""
        except RuntimeError as error:
            # An empty reason would mean success.
            reason = str(error) or "a collective failed without a reason"
        self.complete(completion, reason)

    def complete(self, completion: Completion, reason: str) -> None:
        """Set the completion, which ends its wait. `reason`: "" after a success. Thread-safe."""
        with self._lock:
            if not completion.done():
                self.num_ended += 1
                completion.set_result(reason)

    def forget(self) -> None:
        """Discard all completions. Call this once their waits are over."""
        self._pending.clear()


_lock = threading.Lock()
_by_group: weakref.WeakKeyDictionary[Any, weakref.WeakSet[AbortableWaiter]] = (
    weakref.WeakKeyDictionary()
)
_default: weakref.WeakKeyDictionary[Any, AbortableWaiter] = weakref.WeakKeyDictionary()
_wholes: weakref.WeakKeyDictionary[Any, "weakref.ref[Any]"] = weakref.WeakKeyDictionary()


def wait_abortable(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Wait for a collective of the group that was begun with `async_op=True`, in the trainer's
    thread. Raises an error that backends count as a failure of the group if the collective failed,
    or if the group's waiters are aborted."""
    assert work is not None, "begun with async_op=True, by a rank of the group"
    if not can_be_cut(group):
        with waiting:
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


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce the tensor over the group, in place. Raises what `wait_abortable` raises."""
    wait_abortable(dist.all_reduce(tensor, op, group=group, async_op=True), group)


def waiters_of(group: dist.ProcessGroup) -> list[AbortableWaiter]:
    """Return the waiters of this group and of the groups made within it."""
    with _lock:
        return list(_by_group.get(group, ()))


def add_subgroup(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Make `waiters_of(whole)` include the waiters of `group`."""
    if group is not whole:
        with _lock:
            _wholes[group] = weakref.ref(whole)


def _whole(group: dist.ProcessGroup) -> dist.ProcessGroup:
    with _lock:
        reference = _wholes.get(group)
    whole: dist.ProcessGroup | None = reference() if reference is not None else None
    return group if whole is None else whole
