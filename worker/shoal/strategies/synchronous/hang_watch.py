"""Watch of the *trainer*, the thread that trains: checks at least twice a second if the trainer
waits for other ranks.

Gloo's own time limits cannot be changed while a collective is in progress. So groups have
practically no limits, and this watch finds a collective that does not end in time, not counting
pauses. The watch also ends a bring-up without a coordinator.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import structlog
import torch.distributed as dist

from shoal.backends.abortable.waiter import AbortableWaiter, waiters_of
from shoal_client.liveness.trainer_status import TrainerStatus

log = structlog.get_logger(__name__)

MAX_LOOK_S = 0.5
LOOKS_PER_LIMIT = 20
_SHOAL = Path(__file__).parents[2]
_TORCH = Path(dist.__file__).parent.parent
_COLLECTIVE_FOLDERS = tuple(
    str(path)
    for path in (
        *(_SHOAL / "backends", _SHOAL / "layouts", _SHOAL / "state"),
        *(_TORCH / "distributed", _TORCH / "nn" / "parallel"),
    )
)
"""Folders with the code of collectives: a thread without progress in them waits for other ranks."""
_THREADING = threading.__file__
_CPU_FIELDS = slice(11, 13)
"""Fields of /proc/PID/task/TID/stat after the name: user and system time, in ticks of 10 ms."""


class TrainerStage(Enum):
    """The trainer's stage, as its strategy reports it."""

    AWAY = "in no generation"
    BRINGING_UP = "brings a generation up, or hands over"
    TRAINING = "takes steps"


@dataclass(frozen=True, kw_only=True)
class HangWatchConfig:
    """Limits of a watch, and the functions that it calls."""

    limit_s: float
    leaderless_s: float
    """Time that a bring-up may last without a coordinator."""
    is_away: Callable[[], bool]
    num_moved: Callable[[], int]
    held_until_s: Callable[[], float]
    """Time, by `time.monotonic`, until which limits were suspended; the present time in a pause."""
    report_status: Callable[[TrainerStatus], None]
    hung: Callable[[int], None]
    device_stalled_since_s: Callable[[float], float | None] = lambda now_s: None
    """Time since which the device has been stuck in the trainer's work, or None.

    Takes the present time.
    """
    report_wait: Callable[[float, float], None] = lambda waited_s, stood_s: None
    """Takes the seconds for which the trainer has waited for other members, without and with
    pauses.
    """


@dataclass(frozen=True, kw_only=True)
class TrainerThread:
    """The trainer's stage and thread."""

    stage: TrainerStage = TrainerStage.AWAY
    generation: int = 0
    group: dist.ProcessGroup | None = None
    """None also while the group is being connected."""
    ident: int = 0
    native_id: int = 0

    @property
    def connects(self) -> bool:
        return self.stage is TrainerStage.BRINGING_UP and self.group is None


class HangWatch:
    """Watch of one trainer, with a thread of its own. The trainer calls the methods."""

    def __init__(self, config: HangWatchConfig) -> None:
        self._config = config
        self._trainer = TrainerThread()
        """Replaced as a whole, so that the watch's thread reads consistent fields."""
        self._inside = 0
        self._loads = False
        self._sign_s = time.monotonic()
        # Fields that only the watch's own thread uses.
        self._pending: dict[int, tuple[object, float]] = {}
        self._blocked: tuple[int, float] | None = None
        self._counted: tuple[int, ...] = ()
        self._moved = 0
        self._hang = (0, "")
        self._leaderless_since_s: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shoal-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the watch. May be called twice."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def stage(
        self, stage: TrainerStage, generation: int = 0, group: dist.ProcessGroup | None = None
    ) -> None:
        """Set the stage of the calling trainer. `group`: None while it is being connected."""
        self._trainer = TrainerThread(
            stage=stage,
            generation=generation,
            group=group,
            ident=threading.get_ident(),
            native_id=threading.get_native_id(),
        )
        self.note_progress()

    def note_progress(self) -> None:
        """Note that the trainer makes progress. Cheap."""
        self._sign_s = time.monotonic()

    def note_coordinator_wait(self, *, begins: bool) -> None:
        """Note that the trainer begins or stops waiting for the coordinator."""
        self._inside += 1 if begins else -1
        self.note_progress()

    def note_loading(self, *, begins: bool) -> None:
        """Note that the trainer begins or stops waiting for a batch."""
        self._loads = begins
        self.note_progress()

    def hang_report(self, generation: int) -> str:
        """Reason why the watch cut this generation; empty if it did not. Thread-safe."""
        number, reason = self._hang
        return reason if number == generation else ""

    # --- the watch's thread ---

    def _watch(self) -> None:
        every_s = min(MAX_LOOK_S, self._config.limit_s / LOOKS_PER_LIMIT)
        while not self._closing.wait(every_s):
            self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        trainer = self._trainer
        stage, generation = trainer.stage, trainer.generation
        since_s = self._waits_since_s(trainer, now_s)
        waits = since_s is not None or trainer.connects or self._inside > 0
        if waits:
            self._sign_s = max(self._sign_s, now_s)
        own_code_ns = 0 if waits or stage is TrainerStage.AWAY else int(self._sign_s * 1e9)
        self._config.report_status(
            TrainerStatus(
                moved=self._moved,
                waits=waits,
                own_code_since_ns=own_code_ns,
                loads=self._loads and bool(own_code_ns),
            )
        )
        if stage is TrainerStage.BRINGING_UP:
            self._check_leader(generation, now_s)
        if stage is not TrainerStage.TRAINING:
            return
        held_until_s = self._config.held_until_s()
        waited_s = 0.0 if since_s is None else now_s - max(since_s, held_until_s)
        self._config.report_wait(max(waited_s, 0.0), 0.0 if since_s is None else now_s - since_s)
        if waited_s > self._config.limit_s:
            self._pending.clear()
            self._blocked = None
            self._hung(
                generation,
                f"a collective did not finish for {waited_s:.3g} s; expected the other members in"
                f" it within {self._config.limit_s:g} s (collective_s)",
            )

    def _hung(self, generation: int, reason: str) -> None:
        log.warning("collective_hung", generation=generation, reason=reason)
        self._hang = (generation, reason)
        self._config.hung(generation)

    def _check_leader(self, generation: int, now_s: float) -> None:
        if not self._config.is_away():
            self._leaderless_since_s = None
            return
        self._leaderless_since_s = self._leaderless_since_s or now_s
        if now_s - self._leaderless_since_s > self._config.leaderless_s:
            self._leaderless_since_s = None
            limit = f"{self._config.leaderless_s:g} s"
            self._hung(generation, f"there was no coordinator for {limit} of the bring-up")

    def _waits_since_s(self, trainer: TrainerThread, now_s: float) -> float | None:
        if trainer.group is None:
            self._pending, self._blocked, self._counted = {}, None, ()
            return None
        waiters = waiters_of(trainer.group)
        self._count(waiters)
        begins_s = (
            self._oldest_wait_s(waiters, now_s),
            self._blocked_since_s(trainer, now_s),
            self._config.device_stalled_since_s(now_s),
        )
        return min((since_s for since_s in begins_s if since_s is not None), default=None)

    def _count(self, waiters: Iterable[AbortableWaiter]) -> None:
        counted = (self._config.num_moved(), *sorted(each.num_ended for each in waiters))
        if counted != self._counted:
            self._counted = counted
            self._moved += 1
            self._blocked = None

    def _oldest_wait_s(self, waiters: Iterable[AbortableWaiter], now_s: float) -> float | None:
        known = self._pending
        # Completions are kept until the next look, so that no new completion gets the same id.
        self._pending = {
            id(completion): known.get(id(completion), (completion, now_s))
            for each in waiters
            for completion in each.pending()
        }
        return min((since_s for _, since_s in self._pending.values()), default=None)

    def _blocked_since_s(self, trainer: TrainerThread, now_s: float) -> float | None:
        """Return the time since which the thread has not run, in code that waits for other ranks.

        None: it runs, or is in other code. Finds waits that are not in `AbortableWaiter`.
        """
        ticks = _cpu_ticks(trainer.native_id)
        if ticks is None or not _is_in_collective(trainer.ident):
            self._blocked = None
        elif self._blocked is None or self._blocked[0] != ticks:
            self._blocked = (ticks, now_s)
            return None  # The thread has run since the last look.
        return self._blocked[1] if self._blocked is not None else None


def _cpu_ticks(native_id: int) -> int | None:
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:
        return None
    return sum(map(int, stat.rpartition(")")[2].split()[_CPU_FIELDS]))


def _is_in_collective(ident: int) -> bool:
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code.co_filename == _THREADING:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVE_FOLDERS)
