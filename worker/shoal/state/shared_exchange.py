"""Exchange of bytes between ranks through memory that all ranks of a group share.

The memory is divided into boxes, one for each pair of ranks. In each round a rank fills its boxes,
all ranks wait at a barrier, and each rank reads the boxes meant for it. A second set of boxes is
filled while other ranks still read the first.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.backends.shared_memory.memory import SharedMemory
from shoal.state.host_copies import ALIGNMENT_BYTES

NUM_SETS = 2
MIN_BOX_BYTES = 256 * 1024
"""Minimum size of a box. Below it the barriers cost more than sockets do."""

Cut = list[tuple[int, Tensor]]
"""Contents of one box: pairs of offset in the box and piece."""


class SharedExchange:
    """A rank's side of the exchange. All ranks make the same calls at the same time."""

    def __init__(self, memory: SharedMemory) -> None:
        """Overwrites the memory."""
        self._memory = memory
        self._bytes = torch.frombuffer(memory.data, dtype=torch.uint8)
        self._box_bytes = _box_bytes(memory)

    @staticmethod
    def fits(memory: SharedMemory) -> bool:
        """True if the memory is large enough for an exchange; the same on all ranks."""
        return _box_bytes(memory) >= MIN_BOX_BYTES

    def gather(self, message: bytes, max_bytes: int) -> list[bytes] | None:
        """Return the messages by rank. Raises what `run` raises.

        None, on all ranks: a message is too long.
        """
        memory = self._memory
        each_bytes = len(memory.data) // memory.world_size
        if len(message) <= each_bytes:
            start = memory.rank * each_bytes
            memory.data[start : start + len(message)] = message
        lengths = memory.gather_words(len(message))
        if max(lengths) > min(each_bytes, max_bytes):
            return None
        starts = (rank * each_bytes for rank in range(memory.world_size))
        messages = [
            bytes(memory.data[start : start + length])
            for start, length in zip(starts, lengths, strict=True)
        ]
        # All ranks must have read the messages before any rank overwrites them.
        memory.gather_words()
        return messages

    def run(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send and receive flat tensors of bytes, by peer, with equal byte counts on both sides.

        Raises GenerationBroken if a rank is lost or late, or if the memory is cut.
        """
        sent = {peer: self._cut(tensors) for peer, tensors in sends.items()}
        received = {peer: self._cut(tensors) for peer, tensors in receives.items()}
        own_rounds = max(map(len, sent.values()), default=0)
        number, num_rounds = 0, 1
        while number < num_rounds:
            for peer, boxes in sent.items():
                for box, piece in self._pieces(number, self._memory.rank, peer, boxes):
                    box.copy_(piece)
            # The rank that sends most determines the number of rounds.
            num_rounds = max(self._memory.gather_words(own_rounds))
            for peer, boxes in received.items():
                for box, piece in self._pieces(number, peer, self._memory.rank, boxes):
                    piece.copy_(box)
            number += 1
        # The caller may overwrite the memory on return: all ranks must have read their boxes.
        self._memory.gather_words()

    def _cut(self, tensors: Sequence[Tensor]) -> list[Cut]:
        boxes: list[Cut] = []
        free_bytes = 0
        for tensor in tensors:
            at = 0
            while at < tensor.numel():
                if not free_bytes:
                    boxes.append([])
                    free_bytes = self._box_bytes
                count = min(free_bytes, tensor.numel() - at)
                boxes[-1].append((self._box_bytes - free_bytes, tensor[at : at + count]))
                at, free_bytes = at + count, free_bytes - count
        return boxes

    def _pieces(
        self, number: int, sender: int, receiver: int, boxes: Sequence[Cut]
    ) -> list[tuple[Tensor, Tensor]]:
        if number >= len(boxes):
            return []
        world_size = self._memory.world_size
        box = (number % NUM_SETS * world_size + sender) * world_size + receiver
        starts = [(box * self._box_bytes + at, piece) for at, piece in boxes[number]]
        return [(self._bytes[start : start + piece.numel()], piece) for start, piece in starts]


def _box_bytes(memory: SharedMemory) -> int:
    exact = len(memory.data) // (NUM_SETS * memory.world_size**2)
    return exact // ALIGNMENT_BYTES * ALIGNMENT_BYTES
