"""Messages between the ranks that write one checkpoint: each rank gets the messages of all.

Ranks could not just wait for each other's files: on a shared file system, caches decide when a file
of one machine appears on another, so ranks would have to poll. And a missing file would not show
that its writer has died. A rank sends its message after it has written and synchronised the files
that the message reports.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from shoal.backends.network.peer_connections import PeerConnections
from shoal.backends.process_group.transports import can_be_cut
from shoal_proto.errors import Overloaded

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Limit of one message; the outline of a state takes about 150 bytes for each tensor."""


class Peers(Protocol):
    """One rank's connection to the ranks that write a checkpoint together."""

    @property
    def rank(self) -> int: ...

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank. Collective, on a background thread. Raises
        RuntimeError or GenerationBroken, in bounded time, if a peer is lost, and Overloaded on all
        ranks if a message is longer than `MAX_MESSAGE_BYTES`."""


class SinglePeer:
    """The only rank, which writes the whole checkpoint."""

    rank = 0

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class GroupPeers:
    """Ranks of a process group that has no other use: a checkpoint's collectives run concurrently
    with training's collectives, in an order that differs from rank to rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """Use this group. `device`: the device of the group's tensors; default: the host (Gloo)."""
        self._group = group
        self._device = device or torch.device("cpu")
        self._connections = PeerConnections(group) if can_be_cut(group) else None
        self.rank = group.rank()

    def gather(self, message: bytes) -> list[bytes]:
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        lengths = [int(n) for n in self._all(torch.tensor([sent.numel()], device=self._device))]
        longest = max(lengths)
        if longest > MAX_MESSAGE_BYTES:
            raise Overloaded(
                "a message between the ranks of a checkpoint is too long",
                seen=f"{longest} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}",
            )
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: sent.numel()] = sent
        gathered = zip(self._all(padded), lengths, strict=True)
        return [tensor[:length].cpu().numpy().tobytes() for tensor, length in gathered]

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        # The group's own method: torch's function looks up the group to report an error, and would
        # not find the group of a generation that has ended.
        work = self._group.allgather([gathered], [tensor])
        if self._connections is not None:
            self._connections.wait(work)
        else:
            work.wait()
        return gathered


ALONE = SinglePeer()
