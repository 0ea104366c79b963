"""Small collectives: an all-gather of bytes, and a barrier before an error is raised."""

from collections.abc import Callable
from hashlib import blake2b

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable
from shoal_proto.errors import MalformedMessage

log = structlog.get_logger(__name__)

FIRST_BYTES = 16 * 1024
"""Size of the first collective's message, of which 8 bytes are the length. If the message of any
rank is longer, a second collective sends the rest."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 8
_DIGEST_BYTES = 16


def gather(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the messages of all ranks, by rank. Collective. Raises MalformedMessage, on all ranks,
    if a message is longer than MAX_MESSAGE_BYTES; otherwise raises as `wait_abortable`."""
    first = len(message).to_bytes(_LENGTH_BYTES, "big") + message
    received = _gather(first, FIRST_BYTES, group)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "big") for each in received]
    for rank, length in enumerate(lengths):
        if length > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"rank {rank} sent a message that is too long",
                seen=f"{length} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}",
            )
    starts = [each[_LENGTH_BYTES:] for each in received]
    rest_bytes = max(lengths) - (FIRST_BYTES - _LENGTH_BYTES)
    if rest_bytes > 0:
        rests = _gather(message[FIRST_BYTES - _LENGTH_BYTES :], rest_bytes, group)
        starts = [first + rest for first, rest in zip(starts, rests, strict=True)]
    return [each[:length] for each, length in zip(starts, lengths, strict=True)]


def gather_if_different(message: bytes, group: dist.ProcessGroup) -> list[bytes] | None:
    """Return None if the messages of all ranks are equal (only digests are exchanged then), else
    what `gather` returns."""
    digest = blake2b(message, digest_size=_DIGEST_BYTES).digest()
    digests = _gather(digest, _DIGEST_BYTES, group)
    return None if len(set(digests)) == 1 else gather(message, group)


def _gather(message: bytes, padded_bytes: int, group: dist.ProcessGroup) -> list[bytes]:
    padded = bytearray(padded_bytes)
    padded[: min(len(message), padded_bytes)] = message[:padded_bytes]
    sent = torch.frombuffer(padded, dtype=torch.uint8)
    received = [torch.empty(padded_bytes, dtype=torch.uint8) for _ in range(group.size())]
    wait_abortable(dist.all_gather(received, sent, group=group, async_op=True), group)
    return [each.numpy().tobytes() for each in received]


def barrier_after_collective(group: dist.ProcessGroup) -> None:
    """Return once every rank has the result of the group's last collective."""

    def meet() -> None:
        wait_abortable(dist.all_reduce(torch.zeros(1), group=group, async_op=True), group)

    final_barrier(meet, RuntimeError)


def final_barrier(meet: Callable[[], object], if_cut: type[Exception]) -> None:
    """Make one more barrier, so that every rank has the result of the last collective.

    Call it before all ranks raise the same error. A rank that raises leaves, which cuts the group:
    a rank that has not received the result yet would see the loss of a member, and continue
    without the others. `meet`: the barrier. `if_cut`: the error that `meet` raises if a rank left.
    """
    try:
        meet()
    except if_cut as error:
        # A rank leaves only after this barrier, so all ranks have the result.
        log.info("final_barrier_cut", reason=str(error)[:200])
