"""Messages between the ranks that write one checkpoint: each rank gets the messages of all.

A rank sends its message once it has synchronised the files that the message reports. Waiting for
files instead would not show that a writer has died.
"""

from typing import Protocol

import torch.distributed as dist

from shoal.backends.abortable.gather import gather_padded
from shoal.backends.network.peer_connections import PeerConnections
from shoal.backends.process_group.transports import can_be_cut
from shoal_proto.errors import Overloaded

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_LENGTH_BYTES = 8


class Peers(Protocol):
    """Ranks that write a checkpoint together."""

    @property
    def rank(self) -> int: ...

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank. Collective, on a background thread.

        Raises RuntimeError or GenerationBroken, in bounded time, if a peer is lost. Raises
        Overloaded, on all ranks, for a message longer than `MAX_MESSAGE_BYTES`.
        """


class SinglePeer:
    """A rank that writes the whole checkpoint."""

    rank = 0

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class GroupPeers:
    """Ranks of a process group that has no other use: a checkpoint's collectives run concurrently
    with training's. The lengths of the messages (8 bytes, little-endian) are gathered first, then
    the messages, padded to the longest."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # Unlike the trainer, this thread checks by itself if peers are connected.
        self._wait = PeerConnections(group).wait if can_be_cut(group) else None
        self.rank = group.rank()

    def gather(self, message: bytes) -> list[bytes]:
        length = len(message).to_bytes(_LENGTH_BYTES, "little")
        received = gather_padded(length, _LENGTH_BYTES, self._group, self._wait)
        lengths = [int.from_bytes(each, "little") for each in received]
        longest = max(lengths)
        if longest > MAX_MESSAGE_BYTES:
            raise Overloaded(
                "a message between the ranks of a checkpoint is too long",
                seen=f"{longest} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}",
            )
        padded = gather_padded(message, longest, self._group, self._wait)
        return [each[:length] for each, length in zip(padded, lengths, strict=True)]


ALONE = SinglePeer()
