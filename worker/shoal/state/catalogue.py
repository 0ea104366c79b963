"""What the ranks of one generation have in each copy of their state, told only when it changes."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shoal.state.inventory import (
    Inventory,
    Meta,
    from_json,
    inventory_of,
    malformed,
    pack,
    to_json,
    unpack,
)
from shoal.state.resharding import gather
from shoal.state.shards import Chunk, StateShard
from shoal_proto.errors import InternalError


class Catalogue:
    """The last that each rank has told."""

    def __init__(self, world_size: int) -> None:
        self.names: frozenset[str] = frozenset()
        """Of all tensors, whoever has them."""
        self._told: Inventory | None = None
        self._known: list[Inventory | None] = [None] * world_size

    def announce(self, own: StateShard, group: dist.ProcessGroup) -> list[Mapping[str, Any]]:
        """Tell the others what this rank has of a step and learn what they have; their values.

        Collective. Raises InternalError if the ranks are at different steps, MalformedMessage.
        """
        inventory = inventory_of([StateShard(step=0, shards=own.shards)])
        news = None if inventory == self._told else to_json(inventory)
        self._told = inventory
        words = gather(pack([own.step, dict(own.values), news]), group)
        all_values: list[Mapping[str, Any]] = []
        for rank, word in enumerate(words):
            try:
                step, values, content = unpack(word, rank)
                all_values.append(dict(values))
            except (TypeError, ValueError) as error:
                raise malformed(rank, f"{type(error).__name__}: {error}") from error
            if step != own.step:
                raise InternalError(
                    "ranks copy their state at different steps",
                    seen=f"step {step} on rank {rank}",
                    expected=f"step {own.step} as on rank {group.rank()}",
                )
            if content is not None:
                self._known[rank] = from_json(content, rank)
        known = [each.metas for each in self._known if each is not None]
        self.names = frozenset().union(*known)
        return all_values

    def of(self, rank: int) -> tuple[Mapping[str, Chunk], Mapping[str, Meta]]:
        """The chunks that the rank has, and what tensors they are of. Raises MalformedMessage."""
        inventory = self._known[rank]
        if inventory is None or len(inventory.listings) != 1:
            raise malformed(rank, "a copy without a list of its contents")
        return inventory.listings[0].chunks, inventory.metas
