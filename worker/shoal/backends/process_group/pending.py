"""Operations of a process group in Python that are under way."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(dist.Work):
    """An operation under way. Its future completes on the thread that asks for it."""

    def __init__(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._timeout_s = timeout_s

    def finish(self, timeout_s: float) -> None:
        """Return once the operation is complete. Raises DistBackendError if it never will be."""
        raise NotImplementedError

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.finish(timeout.total_seconds() or self._timeout_s)
        return True

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        # Callbacks of a future run where it completes, and may communicate themselves. So it is
        # complete when it is handed out: what they do then happens on their own rank's thread.
        future: Any = torch.futures.Future()
        self.finish(self._timeout_s)
        future.set_result(self._tensors)
        return future

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_success(self) -> bool:
        return self.is_completed()


class CompletedWork(Pending):
    """Work that was complete when it was created."""

    def finish(self, timeout_s: float) -> None: ...

    def is_completed(self) -> bool:
        return True
