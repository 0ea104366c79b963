"""Collectives that count what they send."""

import torch.distributed as dist
from torch import Tensor

from shoal.torch_private.c10d import all_gather_single


class Traffic:
    """Bytes that one rank has sent for its averages, without the transport's headers.

    Counted as ring algorithms, such as Gloo's, send them. With n ranks, an all-reduce of b bytes is
    2 b (n-1) / n, an all-to-all b (n-1) / n, and an all-gather of b bytes of this rank b (n-1).
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.plain_bytes = 0
        """Bytes of uncompressed all-reduces of the same values."""
        self._before = (0, 0)
        self._step = (0, 0)

    def count_plain(self, values: Tensor, world_size: int) -> None:
        self.plain_bytes += _all_reduce_bytes(values, world_size)

    def count_all_reduce(self, values: Tensor, world_size: int) -> None:
        self.sent_bytes += _all_reduce_bytes(values, world_size)

    def begin_step(self) -> None:
        """Begin to count a step."""
        self._before = (self.sent_bytes, self.plain_bytes)

    def end_step(self) -> None:
        """End the count of the step. May be called again in a step."""
        now = (self.sent_bytes, self.plain_bytes)
        self._step = (now[0] - self._before[0], now[1] - self._before[1])

    def metrics(self) -> dict[str, float]:
        """Return the last step's bytes and compression, and all bytes."""
        sent, plain = self._step
        return {
            "bytes_per_step": float(sent),
            "bytes_sent": float(self.sent_bytes),
            "compression_ratio": plain / sent if sent else 1.0,
        }


class Wire:
    """Asynchronous collectives of one group, counted in `traffic`."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group = group
        self.traffic = traffic
        self.rank = group.rank()
        self.world_size = group.size()

    def all_reduce(self, values: Tensor) -> dist.Work:
        """Sum the values of all ranks in place."""
        self.traffic.count_all_reduce(values, self.world_size)
        return _begun(dist.all_reduce(values, group=self._group, async_op=True))

    def all_to_all(self, received: Tensor, sent: Tensor) -> dist.Work:
        """Send row p of `sent` to rank p; receive row p of `received` from it."""
        self.traffic.sent_bytes += sent.nbytes * (self.world_size - 1) // self.world_size
        return _begun(dist.all_to_all_single(received, sent, group=self._group, async_op=True))

    def all_gather(self, received: Tensor, own: Tensor) -> dist.Work:
        """Receive rank p's `own` in row p of `received`."""
        self.traffic.sent_bytes += own.nbytes * (self.world_size - 1)
        return _begun(
            all_gather_single(received.view(-1), own.view(-1), group=self._group, async_op=True)
        )


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "an asynchronous collective of a rank of the group has a handle"
    return work


def _all_reduce_bytes(values: Tensor, world_size: int) -> int:
    return 2 * values.nbytes * (world_size - 1) // world_size
