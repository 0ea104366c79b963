"""Buffers for all parameters of a job."""

from collections.abc import Sequence
from math import prod

import torch
from history.twin import DTYPES, drawn
from torch import Tensor

from shoal_proto.v1.shards_pb2 import ShardMap


class Values:
    """Buffers of the size of all parameters, by shard as well as by name."""

    def __init__(self, shard_map: ShardMap) -> None:
        self._shards = shard_map.shards
        self._flat = {
            p.name: torch.zeros(prod(p.shape), dtype=DTYPES[p.dtype]) for p in shard_map.parameters
        }

    def draw(self, seed: int) -> None:
        for shard in self._shards:
            sizes = [block.num_elements for block in shard.blocks]
            parts = torch.split(drawn(seed, shard), sizes)
            for block, part in zip(self.of_shard(shard.shard_id), parts, strict=True):
                block.copy_(part)

    def poison(self) -> None:
        """Set one value of every block to NaN."""
        for shard in self._shards:
            for block in self.of_shard(shard.shard_id):
                block[0] = float("nan")

    def of_shard(self, shard_id: int) -> list[Tensor]:
        """Views of a shard's blocks."""
        (shard,) = (s for s in self._shards if s.shard_id == shard_id)
        return [
            self._flat[block.parameter][block.offset : block.offset + block.num_elements]
            for block in shard.blocks
        ]

    def buffers(self, absent: Sequence[str] = ()) -> dict[str, memoryview]:
        return {
            name: memoryview(flat.numpy()).cast("B")
            for name, flat in self._flat.items()
            if name not in absent
        }


__all__ = ["Values"]
