"""Tracker for TensorBoard's event files."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.tracking.tracker import Lock, OpenRun, Run, Tracker, WriteProgress, require, run_name


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """Stores values in TensorBoard's event files, for `tensorboard --logdir DIRECTORY`.

    Each run of a job has a folder, JOB/run-MILLISECONDS, with a file for each member that wrote.
    Raises InvalidSpec if the package tensorboard is not installed.
    """

    directory: str | Path
    """Folder on storage that all hosts of the job share."""

    def __post_init__(self) -> None:
        require("tensorboard", tracker="TensorBoard", extra="tensorboard")

    def open(self, run: Run) -> OpenRun:
        folder = Path(self.directory) / run.job
        lock = Lock(folder / ".shoal.lock")
        try:
            names = [each.name for each in folder.iterdir() if each.is_dir()]
            return _OpenTensorBoard(folder / run_name(run, names, time.time()), lock)
        except BaseException:
            lock.release()
            raise


class _OpenTensorBoard(OpenRun):
    def __init__(self, folder: Path, lock: Lock) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock
        self.written = _written(folder)
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=unix_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            self._lock.release()


def _written(folder: Path) -> WriteProgress:
    """Read the progress from the newest file with a value."""
    files = sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(files):
        written = WriteProgress()
        for step, name in _values(path):
            written = written.with_new(step, frozenset({name})) if step >= written.step else written
        if written.step >= 0:
            return written
    return WriteProgress()


def _values(path: Path) -> Iterable[tuple[int, str]]:
    from tensorboard.backend.event_processing.event_file_loader import (  # noqa: PLC0415
        EventFileLoader,
    )

    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            yield event.step, value.tag
