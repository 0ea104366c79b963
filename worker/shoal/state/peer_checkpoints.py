"""What a member keeps of the state from one generation to the next."""

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
"""A copy takes a moment, and one whose group was cut ends at once."""


class PeerCheckpoints:
    """The live state of the last generation, where it is whole, and copies of own and peers' state.

    The live state is worth something to others only together with what the rest of that
    generation held, and it must be known what all that is: the names are learnt with each copy.
    An optimizer may begin to keep more behind it: with the first gradient of a layer, or another
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
        """All that there was when this member was the only one: nobody else has a copy of it."""
        self._names: frozenset[str] = frozenset()
        self._since: frozenset[str] = frozenset()
        """Names that have come to the live state since, with those that only others had."""
        self._half: StateShard | None = None
        """The names of what an update that was cut short has taken away."""
        self._members: frozenset[str] = frozenset()
        self._uncopied = False

    def held(self, keeping: frozenset[str]) -> list[StateShard]:
        """All that this member could give to the others of a generation in which these members have
        still what they held behind the newest step."""
        held = list(self._copies.held()) if self._copies is not None else []
        live = self._live
        if live is not None and (self._names or self._members <= keeping):
            # Whoever has it still tells of it.
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
        self._live = self._half = None
        # Until the first copy is complete, nobody else has what a member holds; but members that
        # stand still wait for their next step first of all.
        self._uncopied = bool(state_shard.step)
        if self._copies is not None and not self._uncopied:
            # There is no copy from before: without this one, a loss in the first step ends the job.
            self._copies.offer(state_shard)
            self._copies.flush()

    def due(self, step: int) -> bool:
        """True if a copy of the state after so many steps is to be offered."""
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

    def stop(
        self, collect: Callable[[], StateShard], *, stepped_by_others: Collection[str] = ()
    ) -> None:
        """The generation is over; `collect` gives this member's part of its state, which is whole.
        One that is refused is not kept. `stepped_by_others`: see `Layout`."""
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
        """The generation is over, and this member's part of the state behind so many steps with it:
        that had these names."""
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
        """What others keep of parameters that they alone have stepped, and that had no state when
        names were learnt: the same as is kept of any other parameter."""
        known = [each for each in self._names | live.shards.keys() if each.startswith(OPTIM)]
        places = [each.removeprefix(OPTIM).rpartition("/") for each in known]
        new = set(stepped_by_others) - {parameter for parameter, _, _ in places}
        return frozenset(f"{OPTIM}{parameter}/{key}" for parameter in new for _, _, key in places)

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
