"""The all-gather of bytes: errors that all ranks raise."""

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.backends.abortable.gather import FIRST_BYTES, MAX_MESSAGE_BYTES, gather
from shoal_proto.errors import MalformedMessage


def test_a_message_that_is_too_long_is_refused_once_every_rank_has_its_length() -> None:
    """A rank that raises leaves, which cuts the group: the other ranks would see its loss."""
    met = []

    def exchange() -> None:
        group = dist.group.WORLD
        assert group is not None
        if dist.get_rank() == 0:
            gather(bytes(MAX_MESSAGE_BYTES + 1), group)
        parts = [torch.empty(FIRST_BYTES, dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(parts, torch.zeros(FIRST_BYTES, dtype=torch.uint8))
        dist.all_reduce(torch.zeros(1))
        met.append(dist.get_rank())

    with pytest.raises(MalformedMessage, match="rank 0 sent a message that is too long"):
        shoal.run_in_memory(exchange, 2)
    assert met == [1]
