"""Compressed averages of DDP's buckets."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import Completion, OngoingCollective
from shoal.compression.base import Averaging, Compressor, PackedTensors, real_shape
from shoal.compression.gradient_exchange import GradientExchange
from shoal.compression.wire import Traffic, Wire
from shoal.torch_private.c10d import GradBucket


@dataclass(frozen=True)
class BucketAverage:
    averaging: Averaging
    completion: Completion


class CompressedExchange(GradientExchange):
    """Exchange in which `compressor` compresses each bucket.

    A bucket's first collective begins during backward. All ranks must begin the later collectives
    in the same order: they begin when backward has reached the last bucket, in the order of
    buckets.
    """

    aborts_for_good = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        name_of: Callable[[Tensor], str],
        traffic: Traffic,
        compressor: Compressor,
    ) -> None:
        super().__init__(group, name_of, traffic)
        # A single rank calls the compressor too, which adds residuals of earlier steps.
        self._alone = False
        compressor.regroup()
        self._compressor = compressor
        self._wire = Wire(group, traffic)
        self._averages: list[BucketAverage] = []
        self._works: dict[int, OngoingCollective] = {}

    def begin(self, step: int) -> None:
        super().begin(step)
        self._averages.clear()
        self._works.clear()
        self._compressor.begin(step)

    def _begin_average(self, bucket: GradBucket) -> Completion:
        parameters = bucket.parameters()
        packed = PackedTensors(
            # DDP gives a bucket of complex gradients as real numbers.
            bucket.buffer(),
            [self._name_of(parameter) for parameter in parameters],
            list(map(real_shape, parameters)),
        )
        average = BucketAverage(
            self._compressor.averaging(packed, self._wire), self.waiter.new_completion()
        )
        self._averages.append(average)
        self._begin_next(len(self._averages) - 1)
        if bucket.is_last():
            self._finish()
        return average.completion

    @torch.no_grad()
    def _begin_next(self, index: int) -> None:
        average = self._averages[index]
        work = next(average.averaging, None)
        if work is None:
            self.waiter.complete(average.completion, "")
        else:
            self._works[index] = self.waiter.track(work)

    def _finish(self) -> None:
        """Finish all averages in rounds. Each waits for one collective of each bucket, and begins
        the bucket's next one."""
        while self._works:
            for index in sorted(self._works):
                try:
                    self._works.pop(index).wait()
                except RuntimeError as error:
                    self._fail(str(error) or "a collective failed without a reason")
                    return
                self._begin_next(index)

    def _fail(self, reason: str) -> None:
        self._works.clear()
        for average in self._averages:
            self.waiter.complete(average.completion, reason)
        self._averages.clear()


def exchange_for(
    group: dist.ProcessGroup,
    name_of: Callable[[Tensor], str],
    traffic: Traffic,
    compressor: Compressor | None,
) -> GradientExchange:
    """Return the exchange of a generation."""
    if compressor is None:
        return GradientExchange(group, name_of, traffic)
    return CompressedExchange(group, name_of, traffic, compressor)
