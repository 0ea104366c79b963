"""What members keep in host memory so that the state outlives some of them.

Every few steps each rank copies its part of the state, keeps the copy, and gives it to the next
ranks while training goes on.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.gather import gather
from shoal.state.host_buffers import StepCopies
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
from shoal.state.shards import Chunk, StateShard
from shoal_proto.errors import GenerationBroken, InternalError, InvalidSpec

log = structlog.get_logger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
"""A copy travels in messages of this size, each of which must come within a time limit."""


def targets_of(hosts: Sequence[str], copies: int, leaving: Collection[int] = ()) -> list[list[int]]:
    """The ranks that get copies of each rank, from the hosts of all, by rank; pure.

    Ranks stand in a ring, those of a host together, and each gives its copies to those that stand
    as far ahead of it as the largest host is long: on another host, as long as no host has more
    than half of the ranks, and as far as possible where one has. Each is given as many as it gives.

    Where some are `leaving`, only those that stay are given any: of each that leaves one more, as
    it will not be there to have its own.
    """
    world_size = len(hosts)
    ring = sorted(range(world_size), key=lambda rank: (hosts[rank], rank))
    place = {rank: number for number, rank in enumerate(ring)}
    largest = max(Counter(hosts).values())
    ahead = [number * largest % world_size for number in range(1, world_size)]
    distances = [d for d in dict.fromkeys([*ahead, *range(1, world_size)]) if d]
    found = []
    for rank in range(world_size):
        peers = (ring[(place[rank] + distance) % world_size] for distance in distances)
        staying = [peer for peer in peers if peer not in leaving]
        found.append(staying[: copies + (rank in leaving)])
    return found


@dataclass(frozen=True)
class _Ring:
    """Where copies go from one rank, and come to it from."""

    rank: int
    hosts: Sequence[str]
    copies: int

    @property
    def has_peers(self) -> bool:
        return bool(self.copies) and len(self.hosts) > 1

    def peers(self, leaving: Collection[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks that get copies of this one's, where these leave, and those whose copies it
        gets."""
        targets = targets_of(self.hosts, self.copies, leaving)
        sources = [
            (each.index(self.rank), rank) for rank, each in enumerate(targets) if self.rank in each
        ]
        return targets[self.rank], [rank for _, rank in sorted(sources)]


@dataclass(frozen=True)
class LaterGroup:
    """A group that all ranks of the world make with the first copy."""

    make: Callable[[], dist.ProcessGroup]

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()


class PeerCopies:
    """The copies of one generation.

    Each rank keeps a snapshot of its own holding, and of `copies` other ranks what is lost with
    them (`targets_of`): as long as a rank or one of those with its copies is left of each, they
    hold a whole step. So a host may be lost with all its ranks, unless it has more than half of
    them. Of two copies that are kept the older one is written over by the next, and only once the
    newer one is complete on every rank: at each moment there is a step that is complete everywhere,
    from the end of the first copy on. Until then the last generation's remain.

    **How old.** With a copy offered every K steps: as copying must end before the next is offered,
    what a loss finds is at most 2 K steps behind the newest step that any rank has committed, and
    at most K steps if the last copy was complete already.

    **Memory**, on the host: 2 x (this rank's holding + what travels of the `copies` ranks whose
    copies it has), and what members that leave have left with it. Until a generation's first copy
    is complete, up to four copies of generations before it and one of its own; no more than three
    unless several generations in a row end that soon.

    The group must be for nothing else: it is used from a thread, at the same time as others. A
    state's names, shapes and chunks are sent only when they have changed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | LaterGroup,
        *,
        copies: int,
        every_steps: int,
        before: "PeerCopies | None" = None,
        travels: Callable[[str], bool] = lambda _: True,
        limit_s: float | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts`: that of each rank; empty: all have one. `travels` says of each name, on all
        ranks alike, whether it is lost with its rank.

        A message that takes longer than `limit_s` fails the copy. None: than the group's own limit
        for messages, which for a Gloo group of a session is a sixth of the limit of its bring-up.
        """
        if copies < 0 or every_steps < 1:
            raise InvalidSpec(
                "the copies' settings are out of range",
                seen=f"copies={copies} every_steps={every_steps}",
                expected="copies of at least 0, every 1 or more steps",
            )
        rank, world_size = group.rank(), group.size()
        self._ring = _Ring(rank, hosts or [""] * world_size, copies)
        self._every_steps = every_steps
        self._travels = travels
        self._remains: tuple[StepCopies, ...] = before._left() if before is not None else ()
        self._slots = (StepCopies(), StepCopies())
        """The older one first."""
        self._changed = threading.Condition()
        self.num_moved = 0
        """Messages that have come through. Any thread."""
        self._busy = False
        self._closed = False
        self._failure: BaseException | None = None
        self._queue: _Orders = queue.SimpleQueue()
        self._catalogue = Catalogue(world_size)
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._thread: threading.Thread | None = None
        self._later = group if isinstance(group, LaterGroup) else None
        if self._ring.has_peers and not isinstance(group, LaterGroup):
            self._start(group)

    def _start(self, group: dist.ProcessGroup) -> None:
        # It alone has the group: whoever is the last to hold one must wait for its threads.
        self._thread = threading.Thread(
            target=self._serve, args=(group,), name="peer-copies", daemon=True
        )
        self._thread.start()

    # --- the trainer's side ---

    def due(self, step: int) -> bool:
        """True if the state after `step` committed steps is to be offered."""
        return self._ring.has_peers and step % self._every_steps == 0

    def offer(self, state_shard: StateShard, *, leaving: Collection[int] = ()) -> None:
        """Copy this rank's holding, which may change on return: a GPU copies it before what the
        trainer's stream does next. All ranks offer the same steps, and say of the same ranks that
        they leave behind it.

        What goes to peers goes in the background. Waits for the copy before to be complete on all
        ranks: no longer than the time limits of its messages. Raises what that copy failed
        with, as a collective of the group would, and GenerationBroken after `close`. Also in a
        world of one, which forgets what is left of the last generation: nobody needs it any more.
        """
        if not self._ring.has_peers:
            self._remains = ()
            return
        self.flush()
        later, self._later = self._later, None
        if later is not None:
            self._start(later.make())
        slot, newer = self._slots
        slot.clear()
        self._slots = (newer, slot)
        slot.take(state_shard, self._travels)
        self._busy = True
        self._queue.put((slot, leaving))

    def flush(self) -> None:
        """Return once the copy under way is complete on all ranks. Raises as `offer`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._failure or self._closed)
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise GenerationBroken("the copies of this generation were given up")

    def held(self) -> Sequence[StateShard]:
        """All that this rank could give to others: its own snapshots and its peers' copies.

        Any thread. What is still on its way never shows. Valid until the next `offer`; for good
        after `close`.
        """
        return [
            state_shard for slot in (*self._remains, *self._slots) for state_shard in slot.shown()
        ]

    @property
    def complete_step(self) -> int | None:
        """The newest step that is complete on all ranks of this generation, as far as known."""
        complete = [slot.step for slot in self._slots if slot.everywhere and slot.step is not None]
        return max(complete, default=None)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors of the state, as of the last copy that began."""
        return self._catalogue.names

    @property
    def num_bytes(self) -> int:
        """Host memory that is taken now."""
        return sum(slot.num_bytes for slot in (*self._remains, *self._slots))

    def close(self) -> None:
        """Offer and receive no more. Quick, waits for nobody, may be called twice.

        A copy under way goes on, for peers that are still at it, until it ends or its group is cut.
        What is held stays.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)

    def join(self, limit_s: float) -> None:
        """Behind `close`: return once the copy under way has ended, or after this time."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _left(self) -> tuple[StepCopies, ...]:
        """What the next generation is to hold.

        Where no copy was seen to be complete everywhere, that is what this generation was given of
        such copies, the newest that is complete on this rank (it may be so on all, and be all that
        they kept), and the one that was begun.
        """
        own = tuple(slot for slot in self._slots if slot.step is not None)
        if any(slot.everywhere for slot in own):
            return own
        known = [slot for slot in self._remains if slot.everywhere]
        perhaps = [slot for slot in self._remains if slot.full and not slot.everywhere]
        return (*known, *perhaps[-1:], *own)

    # --- the thread's side ---

    def _serve(self, group: dist.ProcessGroup) -> None:
        try:
            while (order := self._queue.get()) is not None:
                slot, ranks = order
                self._copy(slot, ranks, group)
                with self._changed:
                    slot.everywhere = True
                    self._remains = ()
                    self._busy = False
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised to the trainer by its next offer
            log.info("copies_ended", reason=str(error), closed=self._closed)
            with self._changed:
                # Without its frames, which hold the group.
                self._failure = error.with_traceback(None)
                self._changed.notify_all()

    def _copy(self, slot: StepCopies, ranks: Collection[int], group: dist.ProcessGroup) -> None:
        """Give the slot's own part to peers of this rank, where these leave, and take theirs."""
        own = slot.own
        assert own is not None
        slot.wait()
        targets, sources = self._ring.peers(ranks)
        values = self._catalogue.announce(own, group)
        slot.know(self._catalogue.names)
        arriving = {}
        for peer in sources:
            chunks, metas = self._catalogue.of(peer)
            coming = {name: chunk for name, chunk in chunks.items() if self._travels(name)}
            shards, memory = slot.room_for(peer, coming, metas)
            works = [dist.irecv(chunk, group=group, group_src=peer) for chunk in _chunks(memory)]
            arriving[peer] = (shards, works)
        leaving = [
            dist.isend(chunk, group=group, group_dst=peer)
            for peer in targets
            for chunk in _chunks(slot.travelling)
        ]
        for peer, (shards, works) in arriving.items():
            self._wait(works)
            slot.show(peer, shards, values[peer])
        slot.full = True
        self._wait(leaving)
        # Behind this every rank has all that it is to have of this step.
        dist.all_reduce(torch.zeros(1), group=group)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait() if self._limit is None else work.wait(self._limit)
            self.num_moved += 1


_Orders = queue.SimpleQueue[tuple[StepCopies, Collection[int]] | None]


def _chunks(memory: Tensor) -> list[Tensor]:
    starts = range(0, memory.numel(), CHUNK_BYTES)
    return [memory[start : start + CHUNK_BYTES] for start in starts]


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
