"""Lightning's EarlyStopping and ModelCheckpoint with the same decisions on all members."""

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from shoal.session.session import Session

COUNTS = frozenset({"epoch", "step"})
"""Values of a checkpoint's name that are the job's own, and so equal on all members."""


def agreed(session: Session, metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mean of each metric over the members that have it; the exact value if these have
    the same one. A member that has just joined may have None. Metrics that no member has are left
    out."""
    if not metrics:
        return {}
    own = {name: float(value) for name, value in metrics.items() if value is not None}
    counts = session.all_reduce({name: float(name in own) for name in metrics}, "sum")
    low = session.all_reduce({name: own.get(name, math.inf) for name in metrics}, "min")
    high = session.all_reduce({name: own.get(name, -math.inf) for name in metrics}, "max")
    found = {name: low[name] for name in metrics if counts[name]}
    # NaN differs from itself, and its mean is NaN.
    differ = [name for name in found if low[name] != high[name]]
    if differ:
        sums = session.all_reduce({name: own.get(name, 0.0) for name in differ}, "sum")
        found |= {name: sums[name] / counts[name] for name in differ}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


class AgreedStopping:
    """Gives the callback the same value on all members, so that all stop after the same step. A
    member that joins gets the callback's counters if this object is registered state."""

    def __init__(self, callback: EarlyStopping, session: Session) -> None:
        self._callback: Any = callback
        self._session = session
        self.has_stopped = False
        self._evaluate: Callable[[Tensor], Any] = self._callback._evaluate_stopping_criteria
        vars(callback)["_evaluate_stopping_criteria"] = self.evaluate

    def evaluate(self, current: Tensor) -> Any:
        monitor = self._callback.monitor
        found = self._evaluate(agreed(self._session, {monitor: current})[monitor])
        self.has_stopped = self.has_stopped or bool(found[0])
        return found

    def state_dict(self) -> dict[str, Any]:
        callback = self._callback
        return {
            "wait_count": callback.wait_count,
            "stopped_epoch": callback.stopped_epoch,
            "best_score": float(callback.best_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._callback.wait_count = state_dict["wait_count"]
        self._callback.stopped_epoch = state_dict["stopped_epoch"]
        self._callback.best_score = torch.tensor(state_dict["best_score"], dtype=torch.float64)


def link_on_rank_0(callback: ModelCheckpoint, session: Session) -> None:
    """Let rank 0 alone make the link of `save_last="link"`, in a folder that all members share."""
    link = callback._link_checkpoint

    def link_once(*arguments: Any) -> None:
        if session.is_first:
            link(*arguments)

    vars(callback)["_link_checkpoint"] = link_once


class AgreedCheckpoints:
    """Makes the callback choose the same checkpoints on all members, as any of them may become rank
    0.

    A member that joins knows the best checkpoints if this object is registered state. Paths are
    relative to the callback's folder, which may differ by member.
    """

    def __init__(self, callback: ModelCheckpoint, session: Session) -> None:
        self._callback: Any = callback
        self._session = session
        attributes = vars(callback)
        self._save_best: Callable[..., None] = self._callback._save_topk_checkpoint
        self._save_last: Callable[..., None] = self._callback._save_last_checkpoint
        self._exists: Callable[..., bool] = self._callback.file_exists
        attributes["_save_topk_checkpoint"] = self.save_best
        attributes["_save_last_checkpoint"] = self.save_last
        attributes["file_exists"] = self.exists
        link_on_rank_0(callback, session)

    def save_best(self, trainer: Any, metrics: dict[str, Tensor]) -> None:
        callback = self._callback
        named = _names_in(callback.filename or "") | ({callback.monitor} - {None})
        self._save_best(trainer, self._agreed(metrics, named))

    def save_last(self, trainer: Any, metrics: dict[str, Tensor]) -> None:
        if self._callback.save_last:
            metrics = self._agreed(metrics, _names_in(self._callback.CHECKPOINT_NAME_LAST))
        self._save_last(trainer, metrics)

    def _agreed(self, metrics: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
        """Return the metrics; those of these names have the values on which members agree."""
        if sys.exception() is not None:
            return metrics  # this member has raised: no collectives
        own = {name: metrics.get(name) for name in sorted(names - COUNTS)}
        return {**metrics, **agreed(self._session, own)}

    def exists(self, path: Any, trainer: Any) -> bool:
        """True if rank 0 found the file: another member may find a file that rank 0 has just
        written. A member whose training has raised uses its own result."""
        found = self._exists(path, trainer)
        if sys.exception() is not None:
            return found  # this member has raised: no collectives
        return bool(self._session.all_reduce(float(found and self._session.is_first), "max"))

    def state_dict(self) -> dict[str, Any]:
        callback = self._callback
        return {
            "kept": {self._relative(path): float(v) for path, v in callback.best_k_models.items()},
            "best": self._relative(callback.best_model_path),
            "worst": self._relative(callback.kth_best_model_path),
            "last": self._relative(callback.last_model_path),
            "newest": self._relative(callback._last_checkpoint_saved),
            "step": callback._last_global_step_saved,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        callback, kept = self._callback, state_dict["kept"]
        scores = {self._absolute(path): torch.tensor(v).double() for path, v in kept.items()}
        callback.best_k_models = scores
        callback.best_model_path = self._absolute(state_dict["best"])
        callback.kth_best_model_path = self._absolute(state_dict["worst"])
        callback.last_model_path = self._absolute(state_dict["last"])
        # Else a new member alone would write a last checkpoint at the end, and call the collective
        # `exists`.
        callback._last_checkpoint_saved = self._absolute(state_dict["newest"])
        callback.best_model_score = scores.get(callback.best_model_path)
        callback.kth_value = scores.get(callback.kth_best_model_path, callback.kth_value)
        callback._last_global_step_saved = state_dict["step"]

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._callback.dirpath) if path else ""

    def _absolute(self, path: str) -> str:
        return f"{self._callback.dirpath}/{path}" if path else ""


def _names_in(filename: str) -> set[str]:
    """Return the names of the metrics that a checkpoint's file name contains, `{name:.2f}`."""
    return set(re.findall(r"\{([^:}]*)[:}]", filename))
