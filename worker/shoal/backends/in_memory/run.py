"""Run a function on ranks that are threads of this process."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shoal.backends.in_memory.group import open_world
from shoal.backends.in_memory.hub import Hub, rank_text
from shoal.backends.in_memory.worlds import unbind
from shoal_proto.errors import DeadlineExceeded, InvalidSpec
from shoal_proto.numbers_given import as_index, as_number

MAX_RANKS = 256
T = TypeVar("T")


def run_in_memory(
    body: Callable[..., T], world_size: int, *arguments: Any, timeout_s: float = 60.0
) -> list[T]:
    """Run `body(*arguments)` on ranks that are threads; return the results by rank.

    torch.distributed is initialised in each thread with a world of its own: `dist.get_rank()`,
    collectives, `new_group`, `init_device_mesh`, DDP, `fully_shard`, DTensor and pipelining work.
    `timeout_s` limits each wait for another rank. Raises InvalidSpec if `world_size` is not 1 to
    256, or `timeout_s` not above 0.

    A rank that raises ends the waits of all others. The first error is raised here, with a note
    that names the rank. Raises DeadlineExceeded if another rank does not end within `timeout_s`
    after that.

    The ranks share torch's state of the process, above all its random generator. If a model has to
    be the same on all ranks, make it beforehand, and copy it in each rank.
    """
    world_size = as_index("world_size", world_size, least=1, most=MAX_RANKS)
    timeout_s = as_number("timeout_s", timeout_s)
    if not timeout_s > 0:
        raise InvalidSpec("timeout_s is out of range", seen=f"{timeout_s}", expected="above 0")
    return _Run(body, world_size, arguments, timeout_s).results()


class _Run:
    def __init__(
        self,
        body: Callable[..., Any],
        world_size: int,
        arguments: tuple[Any, ...],
        timeout_s: float,
    ) -> None:
        self._body, self._arguments, self._timeout_s = body, arguments, timeout_s
        self._hub = Hub(world_size, timeout_s)
        self._results: list[Any] = [None] * world_size
        self._errors: list[tuple[int, BaseException]] = []
        self._threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(world_size)
        ]

    def results(self) -> list[Any]:
        try:
            for thread in self._threads:
                thread.start()
            self._await_end()
        except BaseException as error:  # even an interrupt must end the ranks
            self._hub.fail(f"the run was ended by {type(error).__name__}")
            raise
        if self._errors:
            rank, first = self._errors[0]
            first.add_note(f"raised on rank {rank} of {len(self._threads)}")
            raise first
        return self._results

    def _await_end(self) -> None:
        """Raises DeadlineExceeded if a rank has not ended `timeout_s` after a failure."""
        hub = self._hub
        with hub.changed:
            hub.changed.wait_for(lambda: hub.failure or self._num_running() == 0)
            if not hub.changed.wait_for(lambda: self._num_running() == 0, self._timeout_s):
                running = [r for r in range(hub.world_size) if r not in hub.ended]
                raise DeadlineExceeded(
                    f"{rank_text(running)} did not end within {self._timeout_s:g} s of a failure",
                    seen=hub.failure,
                    fix="In the body, wait for other ranks only.",
                ) from (self._errors[0][1] if self._errors else None)
        for thread in self._threads:
            thread.join()

    def _num_running(self) -> int:
        return self._hub.world_size - len(self._hub.ended)

    def _run_rank(self, rank: int) -> None:
        try:
            open_world(self._hub, rank)
            try:
                # On a GPU, backward would otherwise run hooks on threads that are not ranks.
                with torch.autograd.set_multithreading_enabled(False):
                    self._results[rank] = self._body(*self._arguments)
            finally:
                unbind()
        except BaseException as error:  # noqa: BLE001 - raised by `results`
            with self._hub.changed:
                self._errors.append((rank, error))
                self._hub.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            self._hub.end(rank)
