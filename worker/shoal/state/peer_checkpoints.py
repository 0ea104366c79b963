"""What a member keeps of the state from one generation to the next."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import structlog
import torch.distributed as dist

from shoal.state.peer_copies import LaterGroup, PeerCopies
from shoal.state.shards import StateShard
from shoal_proto.errors import InvalidSpec, RefusedError
from shoal_proto.numbers_given import as_index

log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""A copy takes a moment, and one whose group was cut ends at once."""


class PeerCheckpoints:
    """The live state of the last generation, where it is whole, and copies of own and peers' state.

    The live state is worth something to others only together with what the rest of that
    generation held, and it must be known what all that is: the names are learnt with each copy.
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
        """All that there was when this member was the only one: nobody else has a copy of it."""
        self._names: frozenset[str] = frozenset()
        self._members: frozenset[str] = frozenset()
        self._uncopied = False

    def held(self, members: frozenset[str]) -> list[StateShard]:
        """All that this member could give to the others of a generation of these members."""
        held = list(self._copies.held()) if self._copies is not None else []
        live = self._live
        if live is not None and (self._names or self._members <= members):
            held.append(replace(live, elsewhere=self._names - live.shards.keys()))
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
        """A generation begins with this state shard, which is whole over its members. `hosts`:
        that of each, by rank; empty: all have one."""
        if len(members) == 1:
            self._alone = None
        elif len(self._members) == 1 and self._live is not None and self._num_copies:
            # Until the first copy is complete, a joiner that is lost would take its part with it.
            self._alone = replace(self._live, elsewhere=frozenset())
        self._members = members
        # Before the first step an optimizer has no state yet: more names are to come.
        self._names = (
            state_shard.elsewhere | state_shard.shards.keys() if state_shard.step else frozenset()
        )
        num_copies = min(self._num_copies, len(members) - 1)
        self._copies = (
            PeerCopies(
                # Members that stand still do not wait for its connections.
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
        self._live = None
        # Until the first copy is complete, nobody else has what a member holds; but members that
        # stand still wait for their next step first of all.
        self._uncopied = bool(state_shard.step)
        if self._copies is not None and not self._uncopied:
            # There is no copy from before: without this one, a loss in the first step ends the job.
            self._copies.offer(state_shard)
            self._copies.flush()

    def due(self, step: int) -> bool:
        """Whether a copy is to be offered of the state after so many steps."""
        if self._copies is None:
            return False
        # Behind the very first step an optimizer's state is there, and its names are to be learnt.
        return self._uncopied or step == 1 or self._copies.due(step)

    def offer(self, state_shard: StateShard) -> None:
        """Copy the state to peers, in the background; all members offer the same steps.

        Waits for the copy before. Raises what that one failed with.
        """
        self._uncopied = False
        if self._copies is not None:
            self._copies.offer(state_shard)
            if self._copies.complete_step is not None:
                self._alone = None

    def hand_over(self, state_shard: StateShard, *, leaving: Collection[int] = ()) -> None:
        """As `offer`, but returns once the copy is complete on all members.

        Until those that stay have copied what they have then, this is all that a loss finds. Ranks
        that are `leaving`, the same on all members, leave what they have with those that stay.
        """
        if self._copies is not None:
            self._copies.offer(state_shard, leaving=leaving)
            self._copies.flush()

    @property
    def num_moved(self) -> int:
        """Messages of copies that have come through in this generation. Any thread."""
        copies = self._copies
        return copies.num_moved if copies is not None else 0

    def interrupt(self) -> None:
        """Let nobody wait for a copy any longer. Any thread."""
        copies = self._copies
        if copies is not None:
            copies.close()

    def stop(self, collect: Callable[[], StateShard] | None) -> None:
        """The generation is over; `collect` gives this member's part of its state, if it is whole.
        One that is refused is not kept."""
        live: StateShard | None = None
        try:
            live = collect() if collect is not None else None
        except RefusedError as error:
            log.warning("state_not_kept", reason=str(error))
        self._live = live
        copies = self._copies
        if copies is not None:
            copies.close()
            if copies.complete_step:
                self._names = copies.names
        if live is not None and len(self._members) == 1:
            self._names = frozenset(live.shards)

    def close(self) -> None:
        """Let go of everything.

        Waits for the copy under way, as it would for a peer that is at it still: a thread that
        frees a tensor while the interpreter ends takes the process with it (torch 2.13, SIGABRT).
        """
        self._live = self._alone = None
        if self._copies is not None:
            self._copies.close()
            self._copies.join(CLOSE_S)
            self._copies = None
