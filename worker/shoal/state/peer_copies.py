"""Copies of the state in the host memory of peers, so that it survives the loss of members."""

import json
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import chain, groupby, islice, product
from operator import contains
from typing import Any

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.gather import gather
from shoal.state.host_buffers import StepCopies
from shoal.state.inventory import (
    Inventory,
    from_json,
    inventory_of,
    malformed,
    pack,
    to_json,
    unpack,
)
from shoal.state.shards import StateShard
from shoal.state.transfer import split_into_messages
from shoal_proto.errors import GenerationBroken, InternalError

log = structlog.get_logger(__name__)

MAX_SWAPPED_RANKS = 64
"""Greatest world size at which ranks swap targets: the search takes up to 0.5 s then."""
COPYING_SHARE, FIRST_INTERVAL, MAX_INTERVAL = 0.05, 2, 10
"""Share of the time during which a copy may be in progress; steps between the first two copies of a
generation; greatest number of steps between two copies."""


def targets_of(hosts: Sequence[str], copies: int, leaving: Collection[int] = ()) -> list[list[int]]:
    """Return, for each rank, the ranks that get its copies; `hosts` is the host of each rank. Pure.

    Ranks form a ring, sorted by host, and each copy goes a fixed distance ahead in the ring. In
    a world of at most MAX_SWAPPED_RANKS ranks, pairs of ranks then swap targets if that puts fewer
    copies on a rank's own host, or on one host twice. Targets on other hosts come first.

    If no rank leaves, a rank receives as many copies as it sends. Then all copies of a rank are on
    different hosts, none on its own, if (`copies` + 1) x (ranks on the largest host) is at most the
    number of all ranks. The first copy goes to another host, unless one host has more than half of
    the ranks.

    Ranks that are `leaving` receive no copies. They send a further copy, since the copy in their
    own memory is lost with them.
    """
    ring, distances, chosen = _choose(tuple(hosts), copies)
    index_in_ring = {rank: number for number, rank in enumerate(ring)}
    targets = []
    for rank, first in enumerate(chosen):
        further = (ring[(index_in_ring[rank] + each) % len(hosts)] for each in distances)
        peers = chain(first, (peer for peer in further if peer not in first))
        staying = (peer for peer in peers if peer not in leaving)
        targets.append(list(islice(staying, copies + (rank in leaving))))
    return targets


@lru_cache(maxsize=1)
def _choose(
    hosts: tuple[str, ...], copies: int
) -> tuple[list[int], list[int], Sequence[Sequence[int]]]:
    world_size = len(hosts)
    ring = sorted(range(world_size), key=lambda rank: (hosts[rank], rank))
    distances = _distances(tuple(hosts[rank] for rank in ring), copies)
    chosen: list[list[int]] = [[] for _ in hosts]
    for number, rank in enumerate(ring):
        ahead = distances[: min(copies, world_size - 1)]
        chosen[rank] = [ring[(number + distance) % world_size] for distance in ahead]
    if copies > 1 and world_size <= MAX_SWAPPED_RANKS and len(set(hosts)) > 1:
        while sum(_swap(hosts, chosen, rank) for rank in ring):
            pass
    for rank, targets in enumerate(chosen):
        targets.sort(key=lambda peer: hosts[peer] == hosts[rank])
    return ring, distances, chosen


def _swap(hosts: Sequence[str], chosen: list[list[int]], rank: int) -> bool:
    """Swap a target of this rank with a target of the first peer with which a swap lowers the sum
    of both ranks' costs; True if there is such a peer."""

    def cost(sender: int, targets: Sequence[int]) -> int:
        """Return the number of repeated hosts, plus a weight for each copy on the sender's host."""
        others = [hosts[each] for each in targets if hosts[each] != hosts[sender]]
        num_own, num_repeated = len(targets) - len(others), len(others) - len(set(others))
        return num_own * 2 * len(targets) + num_repeated

    own = chosen[rank]
    if not cost(rank, own):
        return False
    for peer, theirs in enumerate(chosen):
        for given, taken in product(own, theirs):
            if given == peer or taken == rank or given in theirs or taken in own:
                continue
            new = [taken if each == given else each for each in own]
            their_new = [given if each == taken else each for each in theirs]
            before = cost(rank, own) + cost(peer, theirs)
            if cost(rank, new) + cost(peer, their_new) < before:
                chosen[rank], chosen[peer] = new, their_new
                return True
    return False


def _distances(hosts: Sequence[str], copies: int) -> list[int]:
    """Return all distances in a ring of these hosts. The distances of the copies come first. Each
    is chosen for the fewest copies on a rank's own host; among equals, for the fewest copies on a
    host that already has one."""
    world_size, sizes = len(hosts), Counter(hosts).values()
    holders = [{host} for host in hosts]

    def num_own(distance: int) -> int:
        """Return the number of ranks with a rank of their own host at this distance."""
        steps = distance, world_size - distance
        return sum(max(size - step, 0) for size in sizes for step in steps)

    def num_repeated(distance: int) -> int:
        return sum(map(contains, holders, chain(hosts[distance:], hosts[:distance])))

    others = sorted(range(1, world_size), key=num_own)
    found: list[int] = []
    for _ in range(min(copies, world_size - 1)):
        candidates = list(next(groupby(others, num_own))[1])
        at_once = (each for each in candidates if not num_repeated(each))
        best = next(at_once, None) or min(candidates, key=num_repeated)
        found.append(best)
        others.remove(best)
        for held, host in zip(holders, chain(hosts[best:], hosts[:best]), strict=True):
            held.add(host)
    return found + others


def interval_of(copy_in_steps: float) -> int:
    """Return the number of steps between two copies that each take as long as `copy_in_steps`
    steps: the smallest one that keeps COPYING_SHARE."""
    if not copy_in_steps <= COPYING_SHARE * MAX_INTERVAL:
        return MAX_INTERVAL
    return max(1, math.ceil(copy_in_steps / COPYING_SHARE))


@dataclass(frozen=True)
class _Ring:
    rank: int
    hosts: Sequence[str]
    copies: int

    @property
    def has_peers(self) -> bool:
        return bool(self.copies) and len(self.hosts) > 1

    def peers(self, leaving: Collection[int]) -> tuple[Sequence[int], Sequence[int]]:
        targets = targets_of(self.hosts, self.copies, leaving)
        sources = [
            (each.index(self.rank), rank) for rank, each in enumerate(targets) if self.rank in each
        ]
        return targets[self.rank], [rank for _, rank in sorted(sources)]


@dataclass(frozen=True)
class DeferredGroup:
    """Placeholder of a process group, which all ranks create when the first copy is offered."""

    make: Callable[[], dist.ProcessGroup]

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()


class PeerCopies:
    """Peer copies of one generation.

    Each rank keeps a snapshot of its own state shard and, for `copies` other ranks, the part of
    their state that would be lost with them (`targets_of`). After losses the remaining ranks hold a
    whole step if each rank, or one of its targets, remains.

    The copies of two steps are kept. The next copy overwrites the older one, once the newer one is
    complete on every rank. Until the first copy is complete, those of the previous generation are
    kept.

    **Interval.** Without `every_steps`, ranks exchange with each copy how many steps it took;
    `interval_of` the largest number is the next interval.

    **Age.** If a copy is offered every K steps, the state after a loss is at most 2 K steps older
    than the newest committed step; at most K, if the last copy was complete.

    **Memory**, on the host: 2 x (this rank's state shard + the part sent by each of the `copies`
    ranks), and the copies of members that have left. Until a generation's first copy is complete:
    its own copy in progress, and up to three copies of earlier generations (four, if several
    generations in a row ended before their first copy).

    The group must have no other use: a thread uses it while the trainer uses other groups.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeferredGroup,
        *,
        copies: int,
        every_steps: int | None = None,
        before: "PeerCopies | None" = None,
        travels: Callable[[str], bool] = lambda _: True,
        limit_s: float | None = None,
        hosts: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hosts`: the host of each rank; empty if all are on one host. `travels`: True for the
        name of a tensor that is sent, as it would be lost with its rank; must be the same on all
        ranks. `limit_s`: time limit of a message; None: the group's own."""
        rank, world_size = group.rank(), group.size()
        self._ring = _Ring(rank, hosts or [""] * world_size, copies)
        self._every_steps = every_steps
        self._clock = clock
        self._interval, self._next_step = FIRST_INTERVAL, 0
        self._offered: tuple[int, float] | None = None
        self._travels = travels
        self._earlier_copies: tuple[StepCopies, ...] = (
            before._copies_to_keep() if before is not None else ()
        )
        self._slots = (StepCopies(), StepCopies())
        """Two copies, the older one first."""
        self._changed = threading.Condition()
        self.num_moved = 0
        """Number of completed messages. Thread-safe."""
        self._busy = False
        self._closed = False
        self._failure: BaseException | None = None
        self._queue: _Orders = queue.SimpleQueue()
        self._catalogue = Catalogue(world_size)
        self._limit = None if limit_s is None else timedelta(seconds=limit_s)
        self._thread: threading.Thread | None = None
        self._later = group if isinstance(group, DeferredGroup) else None
        if self._ring.has_peers and not isinstance(group, DeferredGroup):
            self._start(group)

    def _start(self, group: dist.ProcessGroup) -> None:
        # Only this thread may hold the group: dropping the last reference waits for the group's
        # threads.
        self._thread = threading.Thread(
            target=self._serve, args=(group,), name="peer-copies", daemon=True
        )
        self._thread.start()

    # --- the trainer's side ---

    def is_due(self, step: int) -> bool:
        """True if the state after `step` committed steps is to be offered."""
        if self._every_steps is None:
            return self._ring.has_peers and step >= self._next_step
        return self._ring.has_peers and step % self._every_steps == 0

    def offer(self, state_shard: StateShard, *, leaving: Collection[int] = ()) -> None:
        """Copy this rank's state shard to peers, in the background. Once this returns, its tensors
        may be changed as `copy_to_host` allows. All ranks must offer the same steps, with the same
        ranks `leaving` after the step.

        First waits for the previous copy on all ranks, and raises its error; GenerationBroken after
        `close`. Without peers it drops the previous generation's copies.
        """
        if not self._ring.has_peers:
            self._earlier_copies = ()
            return
        self.flush()
        later, self._later = self._later, None
        if later is not None:
            self._start(later.make())
        # The last copy is complete: all ranks have agreed on the same interval.
        self._next_step = state_shard.step + self._interval
        step_s = self._step_s(state_shard.step)
        slot, newer = self._slots
        slot.clear()
        self._slots = (newer, slot)
        began_s = self._clock()
        slot.begin_own_copy(state_shard, self._catalogue.inventory_of(state_shard), self._travels)
        timing = _Timing(taken_s=self._clock() - began_s, step_s=step_s)
        self._busy = True
        self._queue.put((slot, leaving, timing))

    def _step_s(self, step: int) -> float:
        """Return the mean time of the steps since the last offer; infinity at the first one, as its
        copy also opens connections."""
        now_s, before = self._clock(), self._offered
        self._offered = step, now_s
        if before is None or step <= before[0]:
            return math.inf
        return (now_s - before[1]) / (step - before[0])

    def flush(self) -> None:
        """Block until the copy in progress is complete on all ranks. Raises what `offer` raises."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._failure or self._closed)
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise GenerationBroken("the copies of this generation have ended")

    def held(self) -> Sequence[StateShard]:
        """Return all state shards that this rank can give: its own snapshots and its peers'
        complete copies. Thread-safe. Valid until the next `offer`, also after `close`."""
        return [
            state_shard
            for slot in (*self._earlier_copies, *self._slots)
            for state_shard in slot.complete_copies()
        ]

    @property
    def complete_step(self) -> int | None:
        """Newest step that is known to be complete on all ranks of this generation."""
        complete = [
            slot.step
            for slot in self._slots
            if slot.is_complete_everywhere and slot.step is not None
        ]
        return max(complete, default=None)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the state, as of the last copy that began."""
        return self._catalogue.names

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return sum(slot.num_bytes for slot in (*self._earlier_copies, *self._slots))

    def close(self) -> None:
        """End copying. Does not block; may be called twice. A copy in progress, in which peers may
        take part, continues until it is complete or its group is cut. Complete copies are kept."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)

    def join(self, limit_s: float) -> None:
        """Wait, after `close`, until the copy in progress has ended, for at most `limit_s`."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def _copies_to_keep(self) -> tuple[StepCopies, ...]:
        """Return the copies that the next generation is to hold.

        If a copy of this generation is known to be complete on all ranks, this generation's copies
        suffice. Otherwise adds the inherited copies known to be complete on all ranks, and the
        newest one that is complete on this rank: it may be the only one that all ranks have kept.
        """
        own = tuple(slot for slot in self._slots if slot.step is not None)
        if any(slot.is_complete_everywhere for slot in own):
            return own
        known = [slot for slot in self._earlier_copies if slot.is_complete_everywhere]
        maybe_complete = [
            slot
            for slot in self._earlier_copies
            if slot.has_all_peer_copies and not slot.is_complete_everywhere
        ]
        return (*known, *maybe_complete[-1:], *own)

    # --- the thread's side ---

    def _serve(self, group: dist.ProcessGroup) -> None:
        try:
            while (order := self._queue.get()) is not None:
                slot, leaving_ranks, timing = order
                moved_s = self._copy(slot, leaving_ranks, group)
                interval = self._agreed_interval(timing, moved_s, group)
                with self._changed:
                    self._interval = interval
                    slot.is_complete_everywhere = True
                    self._earlier_copies = ()
                    self._busy = False
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised to the trainer by its next offer
            log.debug("peer_copies_ended", reason=str(error), closed=self._closed)
            with self._changed:
                # Drop the traceback: its frames hold the group.
                self._failure = error.with_traceback(None)
                self._changed.notify_all()

    def _copy(
        self, slot: StepCopies, leaving_ranks: Collection[int], group: dist.ProcessGroup
    ) -> float:
        """Send this rank's snapshot in the slot to peers, and receive theirs. Returns the seconds
        that this took, without the wait for peers to begin."""
        began_s = self._clock()
        own = slot.own_copy
        assert own is not None
        slot.wait()
        targets, sources = self._ring.peers(leaving_ranks)
        ready_s = self._clock()
        values = self._catalogue.announce(own, slot.inventory, group)
        waited_s = self._clock() - ready_s
        slot.record_names(self._catalogue.names)
        receives = {}
        for peer in sources:
            shards, memory = slot.buffers_for(peer, self._catalogue.of(peer), self._travels)
            works = [
                dist.irecv(part, group=group, group_src=peer)
                for part in split_into_messages(memory)
            ]
            receives[peer] = (shards, works)
        sends = [
            dist.isend(part, group=group, group_dst=peer)
            for peer in targets
            for part in split_into_messages(slot.sent_memory)
        ]
        for peer, (shards, works) in receives.items():
            self._wait(works)
            slot.add_peer_copy(peer, shards, values[peer])
        slot.has_all_peer_copies = True
        self._wait(sends)
        return self._clock() - began_s - waited_s

    def _agreed_interval(self, timing: "_Timing", moved_s: float, group: dist.ProcessGroup) -> int:
        """Return the interval for the slowest rank. Afterwards all ranks have received all their
        copies of this step."""
        steps = torch.zeros(1, dtype=torch.float64)
        if timing.step_s > 0:
            steps[0] = (timing.taken_s + moved_s) / timing.step_s
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=group)
        slowest = float(steps)
        return interval_of(slowest) if slowest > 0 else FIRST_INTERVAL

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait() if self._limit is None else work.wait(self._limit)
            self.num_moved += 1


@dataclass(frozen=True)
class _Timing:
    taken_s: float
    step_s: float


_Orders = queue.SimpleQueue[tuple[StepCopies, Collection[int], _Timing] | None]


class Catalogue:
    """Inventory and values that each rank announced last."""

    def __init__(self, world_size: int) -> None:
        self.names: frozenset[str] = frozenset()
        self._outline: Mapping[str, object] | None = None
        self._own = self._announced = inventory_of([])
        self._values = ""
        self._inventories: list[Inventory | None] = [None] * world_size
        self._all_values: list[Mapping[str, Any]] = [{} for _ in range(world_size)]

    def inventory_of(self, own: StateShard) -> Inventory:
        """Return the inventory of this rank's state shard, without the step and `values`: the
        same object as last time if names, shapes, chunks and dtypes are the same."""
        outline = {
            name: (shard.shape, shard.chunk, shard.tensor.dtype)
            for name, shard in own.shards.items()
        }
        if outline != self._outline:
            self._own = inventory_of([StateShard(step=0, shards=own.shards)])
            self._outline = outline
        return self._own

    def announce(
        self, own: StateShard, inventory: Inventory, group: dist.ProcessGroup
    ) -> Sequence[Mapping[str, Any]]:
        """Exchange what has changed in inventories and values, by a collective, and return each
        rank's values. `inventory`: of `own`; only another object counts as changed. Raises
        InternalError if the ranks are at different steps, and MalformedMessage."""
        # Compare texts: the settings 1, 1.0 and True are equal, but not the same.
        values = json.dumps(dict(own.values))
        message = [
            own.step,
            values if values != self._values else None,
            to_json(inventory) if inventory is not self._announced else None,
        ]
        self._announced, self._values = inventory, values
        is_new = False
        for rank, received in enumerate(gather(pack(message), group)):
            step, has_inventory = self._note(rank, unpack(received, rank))
            if step != own.step:
                raise InternalError(
                    "ranks copy their state at different steps",
                    seen=f"step {step} on rank {rank}",
                    expected=f"step {own.step} as on rank {group.rank()}",
                )
            is_new = is_new or has_inventory
        if is_new:
            known = [each.metas for each in self._inventories if each is not None]
            self.names = frozenset().union(*known)
        return self._all_values

    def _note(self, rank: int, message: Any) -> tuple[Any, bool]:
        try:
            step, values, inventory = message
            if values is not None:
                self._all_values[rank] = dict(json.loads(values))
        except (TypeError, ValueError, RecursionError) as error:
            raise malformed(rank, f"{type(error).__name__}: {error}") from error
        if inventory is not None:
            self._inventories[rank] = from_json(inventory, rank)
        return step, inventory is not None

    def of(self, rank: int) -> Inventory:
        """Return the inventory of a rank. Raises MalformedMessage."""
        inventory = self._inventories[rank]
        if inventory is None or len(inventory.listings) != 1:
            raise malformed(rank, "a copy without an inventory")
        return inventory
