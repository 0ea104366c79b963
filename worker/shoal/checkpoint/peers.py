"""What ranks that write one checkpoint need of each other: everybody's message at everybody.

A message, not a file that the others look for. On a file system that several machines share, when
a file of one shows up at another is a matter of caches, so whoever waits for files has to poll
and sleep; and a file does not tell that its writer has died. A message that has arrived tells that
its sender has written and synchronised what it speaks of.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from shoal.backends.network.peer_connections import PeerConnections
from shoal.backends.process_group.transports import can_be_cut
from shoal_proto.errors import Overloaded

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""The outline of a state takes about 150 bytes a tensor."""


class Peers(Protocol):
    """The ranks that hold one state, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, by rank; called by all of them, in the background.

        Raises RuntimeError or GenerationBroken, in bounded time, if a peer is lost.
        """


class Alone:
    """One process that holds a whole state."""

    rank = 0

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class GroupPeers:
    """The ranks of a process group that nothing else uses: a checkpoint's collectives run beside
    the training's, and the order of the two differs from rank to rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """`device` is where the group's tensors are: by default the host (Gloo)."""
        self._group = group
        self._device = device or torch.device("cpu")
        self._connections = PeerConnections(group) if can_be_cut(group) else None
        self.rank = group.rank()

    def gather(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
        lengths = [int(n) for n in self._all(torch.tensor([own.numel()], device=self._device))]
        longest = max(lengths)
        if longest > MAX_MESSAGE_BYTES:
            raise Overloaded(
                "a message between the ranks of a checkpoint is too long",
                seen=f"{longest} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}",
            )
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: own.numel()] = own
        gathered = zip(self._all(padded), lengths, strict=True)
        return [tensor[:length].cpu().numpy().tobytes() for tensor, length in gathered]

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        # The group's own call: torch's looks the group up to tell of an error, and no longer finds
        # one whose generation is over.
        work = self._group.allgather([gathered], [tensor])
        if self._connections is not None:
            self._connections.wait(work)
        else:
            work.wait()
        return gathered


ALONE = Alone()
