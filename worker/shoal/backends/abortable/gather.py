"""Small collectives: all-gathers of bytes and of rows, and barriers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import all_reduce, wait_abortable
from shoal_proto.errors import MalformedMessage

log = structlog.get_logger(__name__)

FIRST_BYTES = 16 * 1024
"""Size of the first collective's message. It begins with the length of the whole message (8 bytes,
big-endian). A second collective sends what does not fit."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_Record = TypeVar("_Record")
_LENGTH_BYTES = 8
_DIGEST_BYTES = 16


def record_from(kind: type[_Record], content: Mapping[str, Any]) -> _Record:
    """Build a dataclass from its fields. Unknown fields, as of a later release, are ignored."""
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in known})


def record_of_json(kind: type[_Record], encoded: bytes | str) -> _Record:
    """Build a dataclass from the JSON of its fields; see `record_from`."""
    return record_from(kind, json.loads(encoded))


def gather(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the messages of all ranks, by rank. Collective. Raises MalformedMessage, on all ranks,
    for a message above MAX_MESSAGE_BYTES; otherwise what `wait_abortable` raises."""
    first = len(message).to_bytes(_LENGTH_BYTES, "big") + message
    received = gather_padded(first, FIRST_BYTES, group)
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "big") for each in received]
    for rank, length in enumerate(lengths):
        if length > MAX_MESSAGE_BYTES:
            barrier_after_collective(group)
            raise MalformedMessage(
                f"rank {rank} sent a message that is too long",
                seen=f"{length} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}",
            )
    starts = [each[_LENGTH_BYTES:] for each in received]
    rest_bytes = max(lengths) - (FIRST_BYTES - _LENGTH_BYTES)
    if rest_bytes > 0:
        rests = gather_padded(message[FIRST_BYTES - _LENGTH_BYTES :], rest_bytes, group)
        starts = [first + rest for first, rest in zip(starts, rests, strict=True)]
    return [each[:length] for each, length in zip(starts, lengths, strict=True)]


def gather_if_different(message: bytes, group: dist.ProcessGroup) -> list[bytes] | None:
    """Return None if the messages of all ranks are equal, else what `gather` returns."""
    digest = blake2b(message, digest_size=_DIGEST_BYTES).digest()
    digests = gather_padded(digest, _DIGEST_BYTES, group)
    return None if len(set(digests)) == 1 else gather(message, group)


def gather_padded(
    message: bytes,
    padded_bytes: int,
    group: dist.ProcessGroup,
    wait: Callable[[dist.Work], object] | None = None,
) -> list[bytes]:
    """Return the messages of all ranks, by rank, each padded with zeros or cut to this size.
    Collective.

    `wait` waits for the collective, and raises its errors; default: `wait_abortable`.
    """
    padded = bytearray(message[:padded_bytes].ljust(padded_bytes, b"\0"))
    sent = torch.frombuffer(padded, dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    # torch's own function would not find the group of a generation that has ended.
    work = group.allgather([received], [sent])
    (wait or partial(wait_abortable, group=group))(work)
    return [each.numpy().tobytes() for each in received]


def gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, which have one shape, as rows by rank. Collective."""
    rows = own.new_zeros(group.size(), *own.shape)
    rows[group.rank()] = own
    all_reduce(rows, group)
    return rows


def barrier(group: dist.ProcessGroup) -> None:
    """Wait until all ranks have called this. Raises what `wait_abortable` raises."""
    all_reduce(torch.zeros(1), group)


def barrier_after_collective(group: dist.ProcessGroup) -> None:
    """Return once every rank has the result of the group's last collective."""
    final_barrier(partial(barrier, group), RuntimeError)


def final_barrier(meet: Callable[[], object], if_cut: type[Exception]) -> None:
    """Wait at a further barrier, so that every rank has the result of the last collective.

    Call this before all ranks raise the same error: a rank that leaves cuts the group, and ranks
    without the result would continue without that rank. `if_cut`: the error of `meet` if a rank
    left.
    """
    try:
        meet()
    except if_cut as error:
        # A rank leaves only after this barrier, so all ranks have the result.
        log.info("final_barrier_cut", reason=str(error)[:200])
