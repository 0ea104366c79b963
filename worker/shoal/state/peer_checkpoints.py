"""Peer checkpoints: the state that a member keeps from one generation to the next."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog
import torch.distributed as dist

from shoal.state.peer_copies import LaterGroup, PeerCopies
from shoal.state.shards import OPTIM, StateShard
from shoal_proto.errors import InvalidSpec, RefusedError
from shoal_proto.numbers_given import as_index

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""Time limit for a copy in progress at the end; one whose group was cut ends at once."""


class PeerCheckpoints:
    """Live state of the last generation, if it is whole, and copies of the own and peers' state.

    Other members can use the live state only together with what the rest of that generation held,
    and only if the names of all its tensors are known: each copy updates these names. After a copy
    an optimizer may begin to keep more: with the first gradient of a layer, or after a change of a
    hyperparameter.
    """

    def __init__(self, *, copies: int, every_steps: int) -> None:
        copies = as_index("copies", copies)
        every_steps = as_index("copy_every_steps", every_steps)
        if copies < 0 or every_steps < 1:
            raise InvalidSpec(
                "the copies' settings are out of range",
                seen=f"copies={copies} copy_every_steps={every_steps}",
                expected="copies of at least 0, every 1 or more steps",
            )
        self._num_copies = copies
        self._every_steps = every_steps
        self._copies: PeerCopies | None = None
        self._live: StateShard | None = None
        self._alone: StateShard | None = None
        """Whole state from when this member was the only one: no other member has a copy of it."""
        self._names: frozenset[str] = frozenset()
        self._since: frozenset[str] = frozenset()
        """Names of state that only other members have begun to keep since the names were learnt."""
        self._half: StateShard | None = None
        """Names of the state that an interrupted update has destroyed."""
        self._members: frozenset[str] = frozenset()
        self._uncopied = False

    def held(self, keeping: frozenset[str]) -> list[StateShard]:
        """Return all that this member could give to others of the next generation. `keeping`: its
        members that still hold their live state after the newest step."""
        held = list(self._copies.held()) if self._copies is not None else []
        live = self._live
        if live is not None and (self._names or self._members <= keeping):
            # If all members of that generation keep their state, they report it themselves.
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
        """Begin a generation with this state shard; its members' shards make up a whole state.
        `hosts`: the host of each member, by rank; empty: all are on one."""
        if len(members) == 1:
            self._alone = None
        elif len(self._members) == 1 and self._live is not None and self._num_copies:
            # Until the first copy is complete, the loss of a joiner would also lose its part.
            self._alone = replace(self._live, elsewhere=frozenset())
        self._members = members
        # Before the first step an optimizer has no state yet: the names are not complete.
        self._names = (
            state_shard.elsewhere | state_shard.shards.keys() if state_shard.step else frozenset()
        )
        num_copies = min(self._num_copies, len(members) - 1)
        self._copies = (
            PeerCopies(
                # Made later, so that waiting members need not wait for its connections too.
                LaterGroup(new_group),
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
        # Until the first copy is complete, no other member has what a member holds; but members
        # are waiting, so their next step comes first.
        self._uncopied = bool(state_shard.step)
        if self._copies is not None and not self._uncopied:
            # No earlier copy exists: without this one, a loss in the first step ends the job.
            self._copies.offer(state_shard)
            self._copies.flush()

    def due(self, step: int) -> bool:
        """True if a copy of the state after `step` steps is to be offered."""
        if self._copies is None:
            return False
        # After the very first step an optimizer has state, whose names must be learnt.
        return self._uncopied or step == 1 or self._copies.due(step)

    def offer(self, state_shard: StateShard) -> None:
        """Copy the state to peers, in the background; all members offer the same steps.

        Waits for the previous copy, and raises its error if it failed.
        """
        self._uncopied = False
        if self._copies is not None:
            self._copies.offer(state_shard)
            if self._copies.complete_step is not None:
                self._alone = None

    def hand_over(self, state_shard: StateShard, *, leaving: Collection[int] = ()) -> None:
        """Copy the state to peers as `offer` does, and wait until all members have completed it.

        A loss before the next generation's first copy falls back to this one. `leaving`: ranks
        that leave, the same on all members; they leave their state with the ranks that stay.
        """
        if self._copies is not None:
            self._copies.offer(state_shard, leaving=leaving)
            self._copies.flush()

    @property
    def num_moved(self) -> int:
        """Number of messages of copies completed in this generation. Any thread."""
        copies = self._copies
        return copies.num_moved if copies is not None else 0

    def interrupt(self) -> None:
        """Wake every thread that waits for a copy, with GenerationBroken. Any thread."""
        copies = self._copies
        if copies is not None:
            copies.close()

    def stop(
        self, collect: Callable[[], StateShard], *, stepped_by_others: Collection[str] = ()
    ) -> None:
        """End the generation, and keep the state that `collect` returns: this member's part.
        If `collect` refuses, no live state is kept. `stepped_by_others`: see `Layout`."""
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

    def stop_within_update(self, step: int, names: frozenset[str]) -> None:
        """End the generation without this member's part of the state after `step` steps, which an
        interrupted update destroyed; the part had these names."""
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
        """Return the names of the state of parameters that only other members have stepped and that
        had none when names were learnt: the keys are those kept for any other parameter."""
        known = [each for each in self._names | live.shards.keys() if each.startswith(OPTIM)]
        places = [each.removeprefix(OPTIM).rpartition("/") for each in known]
        new = set(stepped_by_others) - {parameter for parameter, _, _ in places}
        return frozenset(f"{OPTIM}{parameter}/{key}" for parameter in new for _, _, key in places)

    def close(self) -> None:
        """Free everything.

        Waits up to `CLOSE_S` for a copy in progress: a thread that frees a tensor while the
        interpreter exits aborts the process (torch 2.13, SIGABRT).
        """
        self._live = self._alone = None
        if self._copies is not None:
            self._copies.close()
            self._copies.join(CLOSE_S)
            self._copies = None
