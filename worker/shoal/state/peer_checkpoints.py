"""Peer checkpoints: the state that a member keeps in memory from one generation to the next."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog
import torch.distributed as dist

from shoal.state.peer_copies import DeferredGroup, PeerCopies
from shoal.state.shards import OPTIM, StateShard
from shoal_proto.errors import InvalidSpec, RefusedError
from shoal_proto.numbers_given import as_index

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""Time for which `close` waits for a copy in progress; a copy with a cut group ends at once."""


class PeerCheckpoints:
    """Live state of the previous generation, and copies of this member's and its peers' state.

    The next generation can use a live state, a part of the whole, only if the names of all tensors
    are known: otherwise a missing part could not be detected. Each copy updates these names.
    """

    def __init__(self, *, copies: int, every_steps: int | None) -> None:
        copies = as_index("copies", copies)
        if every_steps is not None:
            every_steps = as_index("copy_every_steps", every_steps)
        if copies < 0 or (every_steps is not None and every_steps < 1):
            raise InvalidSpec(
                "the copies' settings are out of range",
                seen=f"copies={copies} copy_every_steps={every_steps}",
                expected="copies: 0 or more; copy_every_steps: 1 or more, or None",
            )
        self._num_copies = copies
        self._every_steps = every_steps
        self._copies: PeerCopies | None = None
        self._live: StateShard | None = None
        self._alone: StateShard | None = None
        """Whole state from when this member was alone; kept until peers have copies."""
        self._names: frozenset[str] = frozenset()
        self._since: frozenset[str] = frozenset()
        """Names of tensors that only other members hold, and that did not exist when `_names` was
        recorded."""
        self._half: StateShard | None = None
        """State shard without contents: names tensors that an interrupted update destroyed."""
        self._members: frozenset[str] = frozenset()
        self._uncopied = False

    def held(self, keeping: frozenset[str]) -> list[StateShard]:
        """Return all state shards that this member can give to the next generation. `keeping`: the
        members of that generation that still hold their live state after the newest step."""
        held = list(self._copies.held()) if self._copies is not None else []
        live = self._live
        if live is not None and (self._names or self._members <= keeping):
            # All members of the previous generation keep their state, and report its names.
            since = frozenset() if self._members <= keeping else self._since
            held.append(replace(live, elsewhere=(self._names | since) - live.shards.keys()))
        if self._half is not None:
            held.append(self._half)
        if self._alone is not None:
            held.append(self._alone)
        return held

    def start(
        self,
        state_shard: StateShard,
        members: frozenset[str],
        new_group: Callable[[], dist.ProcessGroup],
        travels: Callable[[str], bool],
        hosts: Sequence[str] = (),
    ) -> None:
        """Begin a generation with this member's state shard; the shards of all `members` make up
        the whole state. At step 0, waits for the first copy. `travels`, `hosts`: see
        `PeerCopies`."""
        if len(members) == 1:
            self._alone = None
        elif len(self._members) == 1 and self._live is not None and self._num_copies:
            # Until the first copy is complete, a new member's loss would lose its part.
            self._alone = replace(self._live, elsewhere=frozenset())
        self._members = members
        # Before the first step, the names of optimizer state are not complete.
        self._names = (
            state_shard.elsewhere | state_shard.shards.keys() if state_shard.step else frozenset()
        )
        num_copies = min(self._num_copies, len(members) - 1)
        self._copies = (
            PeerCopies(
                # Made at the first copy: bring-up does not wait for its connections.
                DeferredGroup(new_group),
                copies=num_copies,
                every_steps=self._every_steps,
                before=self._copies,
                travels=travels,
                hosts=hosts,
            )
            if num_copies
            else None
        )
        self._live = self._half = None
        # After step 0, the first copy is made after the next step: now it would delay that step.
        self._uncopied = bool(state_shard.step)
        if self._copies is not None and not self._uncopied:
            # At step 0 no earlier copy exists: a loss in the first step would end the job.
            self._copies.offer(state_shard)
            self._copies.flush()

    def is_due(self, step: int) -> bool:
        """True if the state after `step` steps is to be offered for a copy."""
        if self._copies is None:
            return False
        # After the first step an optimizer has state: its names must be recorded.
        return self._uncopied or step == 1 or self._copies.is_due(step)

    def offer(self, state_shard: StateShard) -> None:
        """Copy the state to peers, in the background. All members must offer the same steps. Waits
        for the previous copy, and raises its error if it failed."""
        self._uncopied = False
        if self._copies is not None:
            self._copies.offer(state_shard)
            if self._copies.complete_step is not None:
                self._alone = None

    def hand_over(self, state_shard: StateShard, *, leaving: Collection[int] = ()) -> None:
        """Copy the state to peers as `offer` does, and wait until all members have completed the
        copy. `leaving`: the ranks that leave, and receive no copies; must be the same on all
        members."""
        if self._copies is not None:
            self._copies.offer(state_shard, leaving=leaving)
            self._copies.flush()

    @property
    def num_moved(self) -> int:
        """Number of messages of copies completed in this generation. Thread-safe."""
        copies = self._copies
        return copies.num_moved if copies is not None else 0

    def interrupt(self) -> None:
        """Make every thread that waits for a copy raise GenerationBroken. Thread-safe."""
        copies = self._copies
        if copies is not None:
            copies.close()

    def stop(
        self, collect: Callable[[], StateShard], *, stepped_by_others: Collection[str] = ()
    ) -> None:
        """End the generation, and keep this member's part of the state, which `collect` returns, or
        none if it raises RefusedError. `stepped_by_others`: see
        `Layout.names_stepped_elsewhere`."""
        live: StateShard | None = None
        try:
            live = collect()
        except RefusedError as error:
            log.warning("state_not_kept", reason=str(error))
        self._live = live
        self._end_copies()
        if live is not None:
            if len(self._members) == 1:
                self._names = frozenset(live.shards)
            self._since = self._begun_by_others(live, stepped_by_others)

    def drop_live_state(self, step: int, names: frozenset[str]) -> None:
        """End the generation without a live state: an interrupted update destroyed this member's
        part of the state after `step` steps. `names`: the optimizer state in that part."""
        self._live = None
        if names:
            self._half = StateShard(step=step, shards={}, elsewhere=names)
        self._end_copies()

    def _end_copies(self) -> None:
        copies = self._copies
        if copies is not None:
            copies.close()
            if copies.complete_step:
                self._names = copies.names

    def _begun_by_others(
        self, live: StateShard, stepped_by_others: Collection[str]
    ) -> frozenset[str]:
        """Return the names of tensors that other members' optimizers may have begun to keep since
        the names were recorded: for a parameter without state, every key of other parameters."""
        known = [each for each in self._names | live.shards.keys() if each.startswith(OPTIM)]
        parts = [each.removeprefix(OPTIM).rpartition("/") for each in known]
        new = set(stepped_by_others) - {parameter for parameter, _, _ in parts}
        return frozenset(f"{OPTIM}{parameter}/{key}" for parameter in new for _, _, key in parts)

    def close(self) -> None:
        """Free all state. Waits up to `CLOSE_S` for a copy in progress: a thread that frees a
        tensor while the interpreter exits aborts the process (torch 2.13, SIGABRT)."""
        self._live = self._alone = self._half = None
        if self._copies is not None:
            self._copies.close()
            self._copies.join(CLOSE_S)
            self._copies = None
