"""Loading of batches ahead of the trainer, in the processes of torch's DataLoader.

Whenever the DataLoader delivers a batch, it takes another request from its sampler.

If the trainer needs a batch that was not requested (after a generation change, or for a step that
is taken again), a new *run* of batches begins. The processes skip samples of earlier runs, and the
trainer drops their batches.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.loader_process import LoaderInit, keep_socket_paths_short, open_sockets
from shoal.data.samples import REMEDY, FailedSample, Samples, lacks_resources, preserve_generators
from shoal.torch_private.dataloader import (
    defer_process_errors,
    end_iteration,
    ended_processes_of,
    has_timed_out,
    kill_processes,
    processes_of,
    raise_on_process_end,
)
from shoal_client.progress.ranges import SampleRange
from shoal_proto.errors import InvalidSpec, LoadingFailed
from shoal_proto.numbers_given import convert_fields

log = structlog.get_logger(__name__)

NO_EPOCH = -1
"""Epoch of processes that have loaded nothing yet."""
ENDED_WITHIN_S = 2.0
"""Time within which a child's end is known."""
LOOK_S = 1.0
WORK_SHARE = 0.001
"""Share of a processor's time below which a process is idle."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options for loading batches, as in torch's DataLoader, except `silence_s` and the default of
    `persistent_workers`. Raises InvalidSpec for values out of range."""

    num_workers: int = 0
    """Number of loading processes; 0: the trainer loads."""
    prefetch_factor: int | None = None
    """Number of batches that each process loads ahead; None: 2."""
    pin_memory: bool = False
    """Put batches in page-locked memory, which is copied to a GPU faster."""
    persistent_workers: bool = True
    """Keep the processes over all epochs. False: start new ones in each epoch, which see changes of
    the dataset."""
    worker_init_fn: Callable[[int], None] | None = None
    """Called in each loading process, with its number, before it loads."""
    multiprocessing_context: Any = None
    """"fork", "forkserver" or "spawn". None: "fork" on Linux, unless the script has set another
    method for all processes."""
    timeout: float = 0
    """Seconds that the trainer waits for a batch before it raises LoadingFailed; checked about once
    a second. 0: no limit."""
    silence_s: float = 600.0
    """Seconds in which the processes may begin no sample and use no processor time while the
    trainer waits; then the trainer raises LoadingFailed. 0: no limit. Detects a deadlock: a slow
    process is not silent."""

    def __post_init__(self) -> None:
        numbers = ("timeout", "silence_s")
        convert_fields(self, indices=("num_workers", "prefetch_factor"), numbers=numbers)
        for name in numbers:
            if getattr(self, name) < 0:
                raise InvalidSpec(
                    f"{name} is out of range",
                    seen=f"{getattr(self, name)} s",
                    expected="0 or more",
                )
        if self.num_workers < 0:
            raise InvalidSpec(
                "num_workers is out of range", seen=str(self.num_workers), expected="0 or more"
            )
        if self.prefetch_factor is not None and (self.prefetch_factor < 1 or not self.num_workers):
            raise InvalidSpec(
                "prefetch_factor is out of range",
                seen=f"prefetch_factor={self.prefetch_factor}, num_workers={self.num_workers}",
                expected="1 or more, with num_workers above 0",
            )


@dataclass(frozen=True)
class _BatchRequest:
    run: int
    epoch: int
    indices: list[int]


class _BatchDataset(Dataset[Any]):
    def __init__(self, samples: Samples, present_run: Tensor, num_begun: Tensor) -> None:
        self.samples = samples
        self._present_run = present_run
        self._num_begun = num_begun

    def __getitem__(self, request: _BatchRequest | None) -> tuple[int, Any, bool] | None:
        """Return (run, batch, True if the batch is a tuple): pinning turns tuples into lists."""
        if request is None:
            return None

        def is_current() -> bool:
            self._num_begun.add_(1)
            return int(self._present_run) == request.run

        batch = self.samples.batch(request.epoch, request.indices, is_current)
        return request.run, batch, isinstance(batch, tuple)


class LoadingProgress:
    """Time since the loading processes last began a sample or used processor time."""

    def __init__(self, processes: Sequence[int], num_begun: Tensor) -> None:
        self._processes = processes
        self._num_begun = num_begun
        self._began_s = self._sign_s = time.monotonic()
        self._seen = self._now()

    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def silent_s(self) -> float:
        """Return the seconds since the last sign of work."""
        now_s, seen = time.monotonic(), self._now()
        worked_s = seen[1] - self._seen[1]
        if seen[0] != self._seen[0] or worked_s > WORK_SHARE * (now_s - self._sign_s):
            self._sign_s, self._seen = now_s, seen
        return now_s - self._sign_s

    def _now(self) -> tuple[int, float]:
        return int(self._num_begun), sum(map(_processor_s, self._processes))


def _processor_s(process: int) -> float:
    """Return a process' processor seconds, with ended children; 0 if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / float(os.sysconf("SC_CLK_TCK"))


class _FetchWatch:
    """Thread that ends a hanging fetch: the process that loaded the batch may hang."""

    def __init__(
        self, is_over: Callable[[LoadingProgress], bool], signs: Callable[[], LoadingProgress]
    ) -> None:
        """`is_over`: called every LOOK_S of a long fetch, on a separate thread. To end the wait,
        `is_over` makes the fetch raise and returns True."""
        self._is_over, self._new_signs = is_over, signs
        self._num_begun = self._num_ended = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-fetch-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._num_begun += 1

    def __exit__(self, *_: object) -> None:
        self._num_ended = self._num_begun

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        signs, watched = None, 0
        while not self._closing.wait(LOOK_S):
            number = self._num_begun
            if number != watched or self._num_ended == number:
                signs, watched = None, number
            elif signs is None:
                signs = self._new_signs()
            elif self._is_over(signs):
                return


class _ProcessEnded(RuntimeError):
    """A loading process has ended."""


class BatchLoader:
    """Loader of batches by span. Used only by the trainer's thread."""

    def __init__(
        self, samples: Samples, loading: Loading, indices: Callable[[int, int, int], Tensor]
    ) -> None:
        """`indices(epoch, start, stop)` returns the indices of samples at these positions."""
        self._samples = samples
        self._loading = loading
        self._indices = indices
        self._run = torch.zeros((), dtype=torch.int64)
        self._num_begun = torch.zeros((), dtype=torch.int64)
        self.on_wait: Callable[[float], None] = lambda silent_s: None
        """Called repeatedly while a batch is late, on the trainer's thread or on `_FetchWatch`'s,
        with the seconds since the last sign of work. An exception ends the wait."""
        self._upcoming: Iterator[SampleRange] = iter(())
        self._requested: deque[SampleRange] = deque()
        self._iterator: Iterator[Any] | None = None
        self._watch: _FetchWatch | None = None
        self._refusal: BaseException | None = None
        self._epoch = NO_EPOCH
        self._sockets: frozenset[str] = frozenset()

    def start(self) -> None:
        """Start the processes now; otherwise the first batch starts them. May be called twice.
        Raises LoadingFailed if resources ran out, or TMPDIR is too long for sockets."""
        if self._iterator is not None:
            return
        self._sockets = self._sockets or open_sockets()
        try:
            if self._loading.num_workers:
                keep_socket_paths_short()
                self._run.share_memory_()  # type: ignore[no-untyped-call]
                self._num_begun.share_memory_()  # type: ignore[no-untyped-call]
            self._iterator = self._iteration()
        except (RuntimeError, OSError, MemoryError) as error:
            if not lacks_resources(error):
                raise
            raise LoadingFailed(
                "processes that load batches could not be started",
                seen=f"{type(error).__name__}: {error}",
                expected=f"{self._loading.num_workers} processes that load",
                fix=REMEDY,
            ) from error

    def close(self) -> None:
        """End the processes. May be called twice."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        iterator, self._iterator = self._iterator, None
        end_iteration(iterator)
        self._requested.clear()

    def take(self, span: SampleRange, after: Callable[[], Iterator[SampleRange]]) -> Any:
        """Return the batch of a span; `after` yields the spans that are likely to follow.

        If a loading process ends, all processes are restarted, once for a batch. Raises
        SampleFailed if a sample cannot be loaded or collated. Raises LoadingFailed for an OSError
        or a lack of memory, and if processes cannot start, end again or are late. Raises the errors
        of `on_wait`.
        """
        if self._epoch not in (NO_EPOCH, span.epoch) and not self._loading.persistent_workers:
            self.close()
        self._epoch = span.epoch
        if not self._requested or self._requested[0] != span:
            self._begin_run(span, after)
        try:
            delivered = self._delivered()
        except _ProcessEnded as ended:
            log.warning("loading_processes_restarted", reason=str(ended))
            self._begin_run(span, after)
            try:
                delivered = self._delivered()
            except _ProcessEnded as again:
                raise _loading_failed(self._loading, str(again)) from again
        self._requested.popleft()
        _, batch, is_tuple = delivered
        if isinstance(batch, FailedSample):
            raise batch.raised()
        return tuple(batch) if is_tuple and type(batch) is list else batch

    def _delivered(self) -> tuple[int, Any, bool]:
        self.start()
        while True:
            delivered: tuple[int, Any, bool] | None = self._next()
            # None: requested before the first run, or after the last batch.
            if delivered is not None and delivered[0] == int(self._run):
                return delivered

    def _begin_run(self, span: SampleRange, after: Callable[[], Iterator[SampleRange]]) -> None:
        self._run += 1
        self._requested.clear()
        self._upcoming = _first(span, self._ahead(span, after))

    def _ahead(
        self, span: SampleRange, after: Callable[[], Iterator[SampleRange]]
    ) -> Iterator[SampleRange]:
        for later in after():
            if later.epoch != span.epoch and not self._loading.persistent_workers:
                return
            yield later

    def _next(self) -> Any:
        assert self._iterator is not None, "it was started"
        if not self._loading.num_workers:
            with preserve_generators():
                return next(self._iterator)
        signs = None
        while True:
            delivered, has_come = self._delivered_soon()
            if has_come:
                return delivered
            signs = signs or LoadingProgress(processes_of(self._iterator), self._num_begun)
            self._check_late_batch(signs)

    def _check_late_batch(self, signs: LoadingProgress) -> None:
        """Raise LoadingFailed if a batch takes too long, or the error of `on_wait`. Kills the
        processes first, as they may not react."""
        try:
            self._check(signs)
        except BaseException:
            kill_processes(self._iterator)
            self.close()
            raise

    def _check(self, signs: LoadingProgress) -> None:
        limits, silent_s, waited_s = self._loading, signs.silent_s(), LOOK_S + signs.waited_s()
        self.on_wait(silent_s)
        if limits.timeout and waited_s >= limits.timeout:
            raise _loading_failed(limits, f"timed out after {limits.timeout:g} seconds")
        if limits.silence_s and silent_s >= limits.silence_s:
            raise _loading_failed(
                limits,
                f"no sample was begun, and no processor used, for {silent_s:.0f} s, though the"
                " processes are alive (silence_s)",
            )

    def _ends_fetch(self, signs: LoadingProgress) -> bool:
        try:
            self._check(signs)
        except BaseException as error:  # noqa: BLE001 - raised by the fetch
            self._refusal = error
            kill_processes(self._iterator)
            return True
        return False

    def _delivered_soon(self) -> tuple[Any, bool]:
        """Return (item, True) if the next item arrives within LOOK_S, else (None, False)."""
        assert self._iterator is not None, "it was started"
        try:
            if ended := ended_processes_of(self._iterator):
                raise _ProcessEnded(f"process {', '.join(map(str, ended))} has ended")
            with self._watching(), raise_on_process_end(self._iterator):
                return next(self._iterator), True
        except (RuntimeError, OSError, EOFError) as error:
            refusal, self._refusal = self._refusal, None
            if refusal is not None:
                self.close()
                raise refusal from error
            if has_timed_out(error):
                return None, False
            # A dataset's own errors arrive as a FailedSample. If a process ends during a fetch, the
            # connection closes before the parent knows.
            within_s = 0.0 if isinstance(error, RuntimeError) else ENDED_WITHIN_S
            ended = ended_processes_of(self._iterator, within_s)
            self.close()
            if ended:
                raise _ProcessEnded(str(error)[:500]) from error
            raise _loading_failed(self._loading, str(error)[:500]) from error

    def _watching(self) -> _FetchWatch:
        if self._watch is None:
            processes = processes_of(self._iterator)
            signs = partial(LoadingProgress, processes, self._num_begun)
            self._watch = _FetchWatch(self._ends_fetch, signs)
        return self._watch

    def _requests(self) -> Iterator[_BatchRequest | None]:
        while True:
            span = next(self._upcoming, None)
            if span is None:
                yield None
                continue
            self._requested.append(span)
            indices = self._indices(span.epoch, span.start, span.stop).tolist()
            yield _BatchRequest(int(self._run), span.epoch, indices)

    def _iteration(self) -> Iterator[Any]:
        loading = self._loading
        more: dict[str, Any] = {}
        if loading.num_workers:
            more = {
                "prefetch_factor": loading.prefetch_factor,
                "worker_init_fn": LoaderInit(
                    self._samples.dataset, loading.worker_init_fn, self._sockets
                ),
                "multiprocessing_context": loading.multiprocessing_context or _start_method(),
                "timeout": min(LOOK_S, loading.timeout or LOOK_S),
            }
        loader = DataLoader(
            _BatchDataset(self._samples, self._run, self._num_begun),
            sampler=_Endless(self._requests),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=loading.num_workers,
            pin_memory=loading.pin_memory,
            # Else the seed would be drawn from the trainer's generator.
            generator=torch.Generator().manual_seed(0),
            **more,
        )
        iterator = iter(loader)
        defer_process_errors(iterator)
        return iterator


def _start_method() -> str | None:
    """Return the method by which loading processes start; None: the chosen one.

    Linux's default from Python 3.14 on, forkserver, needs picklable datasets, and scripts with `if
    __name__ == "__main__":`.
    """
    if sys.platform != "linux":
        return None
    default = multiprocessing.get_all_start_methods()[0]
    is_default = multiprocessing.get_start_method(allow_none=True) in (None, default)
    return "fork" if is_default else None


class _Endless:
    def __init__(self, make: Callable[[], Iterator[_BatchRequest | None]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[_BatchRequest | None]:
        return self._make()


def _loading_failed(loading: Loading, seen: str) -> LoadingFailed:
    return LoadingFailed(
        "a process that loads batches has ended, or took too long",
        seen=seen,
        expected=f"{loading.num_workers} processes that load",
        fix="A killed process was often out of memory (see dmesg, and the size of /dev/shm): use"
        " fewer num_workers or a smaller prefetch_factor. For a process that hangs, `py-spy"
        " dump --pid`"
        " shows where.",
    )


def _first(span: SampleRange, others: Iterator[SampleRange]) -> Iterator[SampleRange]:
    yield span
    yield from others


def _as_it_is(delivered: Any) -> Any:
    return delivered
