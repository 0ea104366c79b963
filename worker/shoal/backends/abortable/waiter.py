"""Where a trainer waits for collectives, so that it can be let through when one does not end."""

import threading
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.network.gloo import can_be_cut

Gate = torch.futures.Future[str]
"""What a waiting thread is let through: the reason if what it waited for has failed, or ""."""


class Gates:
    """Gates of our own behind the work of a group.

    A write to a connection that was just reset can leave Gloo waiting for as long as a collective
    may take, with nothing left to shut down. `give_up` opens the gates, and the trainer goes on
    without that thread.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._lock = threading.Lock()
        self._gates: list[Gate] = []
        self.num_ended = 0
        """Of all gates so far. Any thread."""
        if group is not None:
            self.attach(group)

    def attach(self, group: dist.ProcessGroup) -> None:
        """Be among those that `gates_in` finds for this group."""
        whole = _whole(group)
        with _lock:
            _by_group.setdefault(whole, weakref.WeakSet()).add(self)

    def wait(self, work: dist.Work | None) -> None:
        """Return when the collective has ended; raises RuntimeError if it failed."""
        assert work is not None, "asked for asynchronously, by a rank of the group"
        reason = self._gate_behind(work).wait()
        self._forget()
        if reason:
            raise RuntimeError(reason)
        # At its end already; on a GPU what is computed next waits for it too.
        work.wait()

    @property
    def waits(self) -> bool:
        """Whether anything is still on its way. Any thread."""
        return bool(self.shut())

    def shut(self) -> list[Gate]:
        """What is on its way. Any thread."""
        return [gate for gate in list(self._gates) if not gate.done()]

    def give_up(self, reason: str) -> None:
        """Let nobody wait for Gloo any longer. Any thread."""
        for gate in list(self._gates):
            self._open(gate, f"gloo did not end what it did before the cut: {reason}")

    def _new_gate(self) -> Gate:
        gate: Gate = torch.futures.Future()
        self._gates.append(gate)
        return gate

    def _gate_behind(self, work: dist.Work) -> Gate:
        """A gate that opens when the collective has ended, well or not."""
        gate = self._new_gate()
        work.get_future().add_done_callback(partial(self._finished, gate))
        return gate

    def _finished(self, gate: Gate, future: torch.futures.Future[Any]) -> None:
        """Gloo's thread is done with a collective."""
        try:
            future.value()
            reason = ""
        except RuntimeError as error:
            # Empty would say that it went well.
            reason = str(error) or "a collective failed without a reason"
        self._open(gate, reason)

    def _open(self, gate: Gate, reason: str) -> None:
        with self._lock:
            if not gate.done():
                self.num_ended += 1
                gate.set_result(reason)

    def _forget(self) -> None:
        """What was waited for is over."""
        self._gates.clear()


_lock = threading.Lock()
_by_group: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Gates]] = weakref.WeakKeyDictionary()
_default: weakref.WeakKeyDictionary[Any, Gates] = weakref.WeakKeyDictionary()
_wholes: weakref.WeakKeyDictionary[Any, "weakref.ref[Any]"] = weakref.WeakKeyDictionary()


def finish(work: dist.Work | None, group: dist.ProcessGroup) -> None:
    """Return when a collective of the group has ended, which was begun with `async_op=True`.

    Raises RuntimeError if it failed, or if it was given up with the group's gates. For the
    trainer's thread.
    """
    assert work is not None, "asked for asynchronously, by a rank of the group"
    if not can_be_cut(group):
        work.wait()
        return
    whole = _whole(group)
    with _lock:
        gates = _default.get(whole)
    if gates is None:
        gates = Gates(whole)
        with _lock:
            _default[whole] = gates
    gates.wait(work)


def gates_in(group: dist.ProcessGroup) -> list[Gates]:
    """All gates at which somebody may wait for this group or a part of it."""
    with _lock:
        return list(_by_group.get(group, ()))


def part_of(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Let the gates of a group that was made within another be found with that one's."""
    if group is not whole:
        with _lock:
            _wholes[group] = weakref.ref(whole)


def _whole(group: dist.ProcessGroup) -> dist.ProcessGroup:
    with _lock:
        found = _wholes.get(group)
    whole: dist.ProcessGroup | None = found() if found is not None else None
    return group if whole is None else whole


__all__ = ["Gate", "Gates", "finish", "gates_in", "part_of"]
