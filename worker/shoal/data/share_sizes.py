"""Check that shares do not become too small for BatchNorm."""

import math
from collections.abc import Callable, Sequence

import structlog
import torch
from torch import nn
from torch.nn import functional

from shoal import step_context
from shoal.data.order import Order
from shoal.torch_private.watching import before_calls

log = structlog.get_logger(__name__)

LEAST = 2
"""Samples that a layer needs if it has one value for each sample and channel."""


class ShareSizes:
    """Check that the shares of a job's smallest batch are large enough for BatchNorm.

    A layer's first forward pass shows if it needs two samples.
    """

    def __init__(self, order: Callable[[], Order], most_members: int) -> None:
        """`order` returns the present order, as its origin is known only later. `most_members`: the
        job's limit of members; if it has none, the desired number."""
        self._order = order
        self._most_members = most_members
        self._needs_two = self._is_warned = False
        before_calls(functional, "_verify_batch_size", _check_input)

    @property
    def smallest_batch(self) -> int:
        """Size of the smallest batch since the order's origin."""
        order = self._order()
        whole, origin = order.global_batch_size, order.origin
        if order.drop_last:
            return whole
        lengths = [max(order.num_samples - origin.offset, 0)]
        if origin.epoch + 1 < order.num_epochs:
            lengths.append(order.num_samples)
        return min(length % whole or whole for length in lengths)

    @property
    def _fitting(self) -> int:
        """Largest number of members with enough samples in every share; may be 0."""
        return self.smallest_batch // LEAST

    def warn_of_norm_layers(self, model: nn.Module) -> None:
        """Warn, before a batch is loaded, of layers that usually need two samples."""
        layers = (each for each in model.modules() if type(each) is nn.BatchNorm1d)
        if any(each.training for each in layers):
            self._warn()

    def check_norm_input(self, size: Sequence[int]) -> None:
        """Check the sizes of an input that a layer is about to normalise."""
        samples = step_context.current().samples
        values = size[0] * math.prod(size[2:])
        if not self._needs_two and samples is not None and values == samples.count:
            self._needs_two = True
            self._warn()

    def refuses(self, world_size: int) -> str:
        """Describe the expected number of members if with `world_size` members some shares would be
        too small.

        Returns "" if none would be, if no layer is known to need two samples, and if even a single
        member would have too few.
        """
        if not self._needs_two or not 0 < self._fitting < world_size:
            return ""
        return (
            f"at most {self._fitting}: BatchNorm needs {LEAST} samples in each share, and the"
            f" smallest batch has {self.smallest_batch} (drop_last=True, sync_batchnorm=True, a"
            f" larger global_batch_size, or --max {self._fitting})"
        )

    def _warn(self) -> None:
        if self._is_warned or self._fitting >= self._most_members:
            return
        self._is_warned = True
        log.warning(
            "batchnorm_of_one_sample",
            members=self._fitting + 1,
            batch=self.smallest_batch,
            seen=f"with {self._fitting + 1} members or more, some have a share of one sample in a"
            f" batch of {self.smallest_batch}; BatchNorm raises for one value in each channel",
            hint=remedies_of_one_sample(syncs_batchnorm=True),
        )


def remedies_of_one_sample(*, syncs_batchnorm: bool) -> str:
    """Return advice against shares of one sample."""
    synced = "sync_batchnorm=True in session.distribute, which normalises all members' samples"
    return (
        "Use drop_last=True in session.batches, if the last batch of an epoch is the small one; a"
        " larger global_batch_size; fewer members, with --max"
        + (f"; or {synced}." if syncs_batchnorm else ".")
    )


def _check_input(size: Sequence[int]) -> None:
    if not torch.compiler.is_compiling() and (sizes := step_context.current().sizes) is not None:
        sizes.check_norm_input(size)
