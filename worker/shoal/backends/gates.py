"""Where a trainer waits for collectives, so that it can be let through when one does not end."""

import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

Gate = torch.futures.Future[str]
"""What a waiting thread is let through: the reason if what it waited for has failed, or ""."""


class Gates:
    """Gates of our own behind the work of a group.

    A write to a connection that was just reset can leave Gloo waiting for as long as a collective
    may take, with nothing left to shut down. `give_up` opens the gates, and the trainer goes on
    without that thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: list[Gate] = []

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
        return any(not gate.done() for gate in list(self._gates))

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
                gate.set_result(reason)

    def _forget(self) -> None:
        """What was waited for is over."""
        self._gates.clear()


__all__ = ["Gate", "Gates"]
