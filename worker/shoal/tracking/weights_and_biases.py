"""Tracker for Weights & Biases, online or in files that are uploaded later."""

import json
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.tracking.tracker import Lock, OpenRun, Run, Tracker, WriteProgress, require, run_name

SETTLED_S = 1.0
"""Time without growth after which a run's file counts as complete."""
STEP = "step"
_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(.+)")
"""Name of the folder in which wandb keeps a run's files, with the run's id."""
_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_FRAME = struct.Struct("<IHB")
"""Checksum, number of bytes, kind."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass(frozen=True)
class WandB(Tracker):
    """Stores values as the history of a Weights & Biases run, over the metric `step`.

    A run's id is JOB-run-MILLISECONDS. If several members wrote a run one after another in offline
    mode, upload their files in that order with `wandb sync --append`. Raises InvalidSpec if the
    package wandb is not installed.
    """

    project: str
    directory: str | Path = "."
    """Folder for wandb's files, on storage that all hosts of the job share."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: nothing is sent."""

    def __post_init__(self) -> None:
        require("wandb", tracker="WandB", extra="wandb")

    def open(self, run: Run) -> OpenRun:
        folder = Path(self.directory) / "wandb"
        lock = Lock(folder / f".shoal-{run.job}.lock")
        try:
            return self._open(run, folder, lock)
        except BaseException:
            lock.release()
            raise

    def _open(self, run: Run, folder: Path, lock: Lock) -> OpenRun:
        import wandb  # noqa: PLC0415 - an extra, and slow

        prefix = f"{run.job}-"
        folders = _folders(folder)
        names = [run_id.removeprefix(prefix) for run_id, _ in folders if run_id.startswith(prefix)]
        run_id = prefix + run_name(run, names, time.time())
        written = _written([path for each, path in folders if each == run_id])
        opened = wandb.init(
            project=self.project,
            id=run_id,
            name=run.job,
            dir=str(self.directory),
            mode=self.mode,
            resume=None if self.mode == "offline" else "allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, disable_git=True, console="off"),
        )
        opened.define_metric("*", step_metric=STEP)
        return _OpenWandB(opened, written, folder / f".shoal-{run_id}.jsonl", lock)


class _OpenWandB(OpenRun):
    """Run with a journal, from which the next writer logs values that wandb's files lack.

    wandb keeps values in the memory of its own process for up to 15 seconds, and a kill may lose
    them.
    """

    def __init__(self, run: Any, written: WriteProgress, journal: Path, lock: Lock) -> None:
        self._run = run
        self.written = written
        self._lock = lock
        for step, unix_s, values in _journalled(journal):
            if rest := self.written.unwritten(step, values):
                self._log(step, rest, unix_s)
                self.written = self.written.with_new(step, frozenset(rest))
        self._journal = journal.open("a")
        self._journal.write("\n")  # ends a line that a kill may have cut off

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._journal.write(json.dumps([step, unix_s, values]) + "\n")
        self._log(step, values, unix_s)

    def _log(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        # Not wandb's own step: wandb rejects values of a step once it has values of a later one.
        self._run.log({**values, STEP: step, "_timestamp": unix_s})

    def flush(self) -> None:
        self._journal.flush()

    def close(self) -> None:
        try:
            self._journal.close()
            self._run.finish()
        finally:
            self._lock.release()


def _journalled(path: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Yield the journal's values in order, without a line that a kill has cut off."""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("[") and line.endswith("]"):
            step, unix_s, values = json.loads(line)
            yield step, unix_s, values


def _folders(folder: Path) -> list[tuple[str, Path]]:
    """Return the folders of all runs with the runs' ids, the oldest first."""
    paths = sorted(folder.glob("*run-*"), key=lambda path: path.stat().st_mtime_ns)
    matched = ((_FOLDER.fullmatch(path.name), path) for path in paths)
    return [(found[1], path) for found, path in matched if found is not None]


def _written(folders: list[Path]) -> WriteProgress:
    """Wait until no process writes; read the progress from the newest file with a value."""
    for folder in reversed(folders):
        written = WriteProgress()
        for path in _settled(folder):
            for step, names in _rows(path):
                if step >= written.step:
                    written = written.with_new(step, names)
        if written.step >= 0:
            return written
    return WriteProgress()


def _settled(folder: Path) -> list[Path]:
    """Return the folder's files once they and the folder have not changed for SETTLED_S.

    The folder's name contains the second of its creation, so the next folder gets another name.
    """
    seen_s, since_s = 0.0, 0.0
    while True:
        files = list(folder.glob("run-*.wandb"))
        newest_s = max(path.stat().st_mtime for path in (folder, *files))
        if newest_s != seen_s:
            seen_s, since_s = newest_s, time.monotonic()
        # A file server's clock may be ahead.
        unchanged_s = max(time.time() - newest_s, time.monotonic() - since_s)
        left_s = SETTLED_S - unchanged_s
        if left_s <= 0:
            return files
        time.sleep(min(left_s, SETTLED_S))


def _rows(path: Path) -> Iterator[tuple[int, frozenset[str]]]:
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        if STEP in items:
            names = frozenset(name for name in items if name != STEP and name[:1] != "_")
            yield int(float(items[STEP])), names


def records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a run's file, which may still be being written.

    wandb stores protobuf records, framed as in LevelDB's log: see
    https://github.com/google/leveldb/blob/main/doc/log_format.md. wandb's file begins with seven
    more bytes, which count as part of the first block.
    """
    data, at, parts = path.read_bytes(), _FILE_HEADER_BYTES, b""
    while at + _FRAME.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _FRAME.size:
            at += left
            continue
        _, num_bytes, kind = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        at = start + num_bytes
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at > len(data):
            return
        parts = data[start:at] if kind in (_FULL, _FIRST) else parts + data[start:at]
        if kind in (_FULL, _LAST):
            yield parts
