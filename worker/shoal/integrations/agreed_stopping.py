"""Lightning's EarlyStopping as one decision of the job, and not one of each member."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from shoal.session.session import Session


class AgreedStopping:
    """Lets the callback judge a value that all members have in common, so that they stop after the
    same step. What it has counted is state of the job: a member that joins goes on with it."""

    def __init__(self, callback: EarlyStopping, session: Session) -> None:
        self._callback: Any = callback
        self._session = session
        self._evaluate: Callable[[Tensor], Any] = self._callback._evaluate_stopping_criteria
        vars(callback)["_evaluate_stopping_criteria"] = self.evaluate

    def evaluate(self, current: Tensor) -> Any:
        """By the mean over members; of what is the same on all of them, by that."""
        value = float(current)
        ends = self._session.all_reduce({"high": value, "low": -value}, "max")
        if float(ends["high"]) != -float(ends["low"]):
            value = float(self._session.all_reduce(value, "mean"))
        return self._evaluate(torch.tensor(value, dtype=torch.float64))

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
