"""Works (`dist.Work`) of process groups in Python."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(dist.Work):
    """Operation in progress. `get_future` waits for its end."""

    def __init__(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._timeout_s = timeout_s

    def finish(self, timeout_s: float) -> None:
        """Wait until the operation is complete. Raises DistBackendError if it cannot be."""
        raise NotImplementedError

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.finish(timeout.total_seconds() or self._timeout_s)
        return True

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        # Completed here, so that callbacks, which may communicate, run on this rank's thread.
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
    """Work that is complete from the start."""

    def finish(self, timeout_s: float) -> None: ...

    def is_completed(self) -> bool:
        return True
