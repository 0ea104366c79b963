"""asyncio in virtual time: an event loop for each process, to run the shipped code.

A process has its own clock, may be paused and woken, and dies without notice. Its loop runs
callbacks in the order in which they are due, and none while the process is paused.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from support.sim.replication.machine import Act, Network, SimProcess
from support.sim.virtual_time import Clock

from shoal_proto.errors import Unavailable

T = TypeVar("T")


class LoopProcess(SimProcess):
    """A process that runs an event loop."""

    def __init__(self, clock: Clock, name: str) -> None:
        super().__init__(clock, name)
        self.loop = SimLoop(self)

    def wake(self) -> None:
        """Resume: callbacks that became due meanwhile run now, in order."""
        self.paused_since_s = None
        parked, self._parked = self._parked, []
        for what in parked:
            self.act(0.0, what)

    def do(self, what: Act) -> None:
        """Run the callback now, or keep it while the process is paused or dead.

        The tasks of a dead process end when it is closed.
        """
        if self.alive and self.paused_since_s is None:
            what()
        else:
            self._parked.append(what)

    def die(self) -> None:
        self.alive, self.paused_since_s = False, None

    def close(self) -> None:
        """Cancel all tasks of the process, even of a dead one."""
        self.alive = True
        self.loop.cancel_all()
        self.wake()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine on this process's loop. An error in it fails the simulation."""
        with self.loop.running():
            return self.loop.create_task(work)


class _Handle(asyncio.TimerHandle):
    """A scheduled callback, which can be cancelled."""

    def __init__(self, when_s: float, loop: "SimLoop") -> None:
        super().__init__(when_s, lambda: None, (), loop)


_numbers = itertools.count()


class _Task(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.AbstractEventLoop):
    """Event loop of a process in virtual time, with the methods that Shoal's code needs."""

    def __init__(self, process: LoopProcess) -> None:
        self._process = process
        self.failures: list[BaseException] = []
        """Exceptions of tasks that no code has retrieved."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def running(self) -> "_Running":
        """Make this the running loop within a block."""
        return _Running(self)

    def time(self) -> float:
        return self._process.now_s

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self._schedule(0.0, self.time(), callback, args, context)

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._schedule(self._process.in_s(when), when, callback, args, context)

    def _schedule(
        self,
        delay_s: float,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        handle = _Handle(when_s, self)
        context = context or contextvars.copy_context()

        def run() -> None:
            if not handle.cancelled():
                with self.running():
                    context.run(callback, *args)

        self._process.act(delay_s, run)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        task = _Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel_all(self) -> None:
        """Cancel every task that has not ended."""
        with self.running():
            for task in list(self._tasks):
                task.cancel()

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run the function at once, as threads take no time here."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and self._process.alive:
            self.failures.append(error)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing. asyncio calls this so that a loop may forget the handle."""


class _Running:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._before: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> None:
        self._before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)

    def __exit__(self, *exc: object) -> None:
        asyncio._set_running_loop(self._before)


async def remote(
    network: Network,
    caller: LoopProcess,
    target: LoopProcess,
    make: Callable[[], Coroutine[Any, Any, T]],
    timeout_s: float,
) -> T:
    """Call over the network. Returns the result of a coroutine that runs on the target's loop.

    Raises the coroutine's errors, and Unavailable if the target is dead, cut off, or silent for too
    long. The coroutine may then still run; it is cancelled once the target learns of the timeout.
    """
    answer: asyncio.Future[T] = caller.loop.create_future()
    task: list[asyncio.Task[T]] = []

    def settle(done: "asyncio.Task[T]") -> None:
        if answer.done() or done.cancelled():
            return
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    def answered(done: "asyncio.Task[T]") -> None:
        if not done.cancelled():
            done.exception()
        _send(network, target, caller, lambda: settle(done))

    def arrived() -> None:
        with target.loop.running():
            task.append(target.loop.create_task(make()))
            task[0].add_done_callback(answered)

    if target.alive:
        _send(network, caller, target, arrived)
        refused_after_s = timeout_s
    else:
        refused_after_s = min(timeout_s, 0.01)
    try:
        async with asyncio.timeout(refused_after_s):
            return await answer
    except TimeoutError:
        raise Unavailable(f"{target.name} does not answer {caller.name}") from None
    finally:
        if not answer.done() or answer.cancelled():
            _send(network, caller, target, lambda: [each.cancel() for each in task])


def _send(network: Network, source: LoopProcess, to: LoopProcess, what: Act) -> None:
    """Run `what` on the other process after a delay, unless the network is cut now or then."""
    if network.is_cut(source.name, to.name):
        return

    def arrive() -> None:
        if not network.is_cut(source.name, to.name):
            to.do(lambda: _within(to, what))

    source.clock.later(network.delay_s(source.name, to.name), arrive)


def _within(process: LoopProcess, what: Act) -> None:
    with process.loop.running():
        what()
