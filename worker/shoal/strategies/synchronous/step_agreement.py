"""A member's part in the agreement of all members on each step, before the step is committed.

Each member casts a vote before a further pass, unless the members have agreed on the number of
parts, and before the step is applied. If votes differ, all members raise. Without votes,
collectives of different passes would be matched, and a member with another learning rate would
drift away.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from shoal.backends.abortable.gather import barrier_after_collective, gather
from shoal.backends.shared_memory.messages import SharedMessages
from shoal.strategies.synchronous.hyperparameters import (
    Hyperparameters,
    Values,
    digest_of,
    with_norms,
)
from shoal.strategies.synchronous.script_position import ScriptPosition, StepStopped
from shoal.strategies.synchronous.step_vote import (
    NUM_WORDS,
    Ballot,
    Flag,
    OptimizerAction,
    StepVote,
    agree,
    check_passes,
    check_votes,
    need_whole_votes,
    weights_of,
)
from shoal_proto.errors import InvalidSpec


class StepCut:
    """The parts into which a step is cut; the gradients of all parts are reduced with the last one.

    After a step without parts, no member votes before the first pass. That pass is reduced on its
    own, even if it is a part. After a step with parts, all members vote on the number of parts
    before the first pass. Members that work on the same samples always do so, because their first
    messages already have the shape of a part.
    """

    def __init__(self, *, shares_samples: bool = False) -> None:
        self.shares_samples = shares_samples
        self._last = 1
        self.begin()

    def begin(self) -> None:
        self.num_parts = 1
        self.is_agreed = False

    def begin_part(self, index: int, num_parts: int) -> bool:
        """Note that the next pass is for this part; return True if it reduces gradients."""
        self.num_parts = num_parts
        is_alone = index == 0 and self._last == 1 and not self.shares_samples
        return index == num_parts - 1 or is_alone

    @property
    def is_voted_on_first(self) -> bool:
        """True if members still have to vote on the parts, before the first backward pass."""
        return (self._last > 1 or self.shares_samples) and not self.is_agreed

    @property
    def fixes_num_passes(self) -> bool:
        """True if each member's number of passes follows from the agreed parts."""
        return self.is_agreed and self.num_parts > 1

    def commit(self) -> None:
        """Note that all members take the step."""
        self._last = self.num_parts


class StepWeights:
    """The weights of a member's losses in a step, for means over units such as tokens.

    The sum of weights is known only after the last pass: then the summed gradients are divided.
    """

    def __init__(self, position: ScriptPosition) -> None:
        """`position` keeps the `unit` over generations."""
        self._position = position
        self.begin()

    @property
    def unit(self) -> float:
        """Divisor of the weights, so that gradients are about as large as without weights.

        A power of two, to cause no rounding; the same on all members of a generation.
        """
        return 2.0 ** (self._position.weight_exponent or 0)

    def begin(self) -> None:
        self.own: float | None = None
        """Sum of this member's weights; None while its losses are weighted by samples."""

    @property
    def are_own(self) -> bool:
        """True if the script has given weights for this member's losses."""
        return self.own is not None

    def add(self, weight: float) -> None:
        """Add the weight of a loss."""
        self.own = (self.own or 0.0) + weight

    def factor(self, weights: Sequence[float]) -> float:
        """Return the factor that turns the averaged gradients into weighted means; set the next
        `unit`.

        `weights`: of each member; members that share samples all give the weight of these samples.
        """
        mean = math.fsum(weights) / len(weights)
        unit = self.unit
        self._position.weight_exponent = math.floor(math.log2(mean))
        return unit / mean


class StepAgreement:
    """A member's part in the agreement, for one generation."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[str],
        hyperparameters: Hyperparameters,
        position: ScriptPosition,
        *,
        shares_samples: bool = False,
    ) -> None:
        """`members`: names by rank. `shares_samples`: some members work on the same samples."""
        self._group = group
        self._members = members
        self._hyper = hyperparameters
        self._position = position
        self._words = SharedMessages(group, NUM_WORDS)
        self._vote = StepVote()
        self._digested: tuple[tuple[object, ...], int] = ((), 0)
        self._steps = 0
        self._step = 0
        self._passes = 0
        self._cut = StepCut(shares_samples=shares_samples)
        self.weights = StepWeights(position)
        self.faults: Sequence[bool] = ()
        """True, by rank, for members with gradients that are not finite; valid once the step is
        settled.
        """
        self._announced = False
        self._settled = self._reopened = False

    def begin(self, step: int) -> None:
        """Begin a step. `step`: number of committed steps."""
        self._step = step
        self._passes = 0
        self._cut.begin()
        self.weights.begin()
        self._position.exchanges.begin_step()
        self._announced = False
        self._words.forget()
        self._settled = self._reopened = False
        self._steps += 1

    @property
    def is_settled(self) -> bool:
        """True once `settle` has shown that all members take the step."""
        return self._settled

    @property
    def members(self) -> Sequence[str]:
        """Members by rank."""
        return self._members

    @property
    def is_first_step(self) -> bool:
        """True in the first step of the generation."""
        return self._steps == 1

    def begin_part(self, index: int, num_parts: int) -> bool:
        """See `StepCut.begin_part`."""
        return self._cut.begin_part(index, num_parts)

    # --- votes on passes ---

    def exchange_parts(self) -> None:
        """Send a vote on the parts as a forward pass begins, if one is due.

        Members that share samples wait for all votes here, and raise UnequalPasses if votes differ;
        other members do so in `vote_pass`.
        """
        if self._cut.is_voted_on_first and not self._words.has_sent:
            self._cast(StepVote(parts=self._cut.num_parts))
            if self._cut.shares_samples:
                self._receive_ballots()
                self._cut.is_agreed = True

    def announce(self) -> None:
        """Vote on a further pass, as a forward pass that communicates begins.

        Raises UnequalPasses on all members unless all of them make that pass.
        """
        if self._passes and not self._announced and not self._cut.fixes_num_passes:
            self._announced = True
            is_cut = self._cut.num_parts > 1
            further = StepVote(passes=self._passes + 1)
            self._cast(StepVote(parts=self._cut.num_parts) if is_cut else further)
            self._receive_ballots()
            self._cut.is_agreed |= is_cut

    def vote_pass(self) -> None:
        """Vote, as a backward pass begins. Raises what `announce` raises."""
        self.exchange_parts()
        if self._words.has_sent:
            self._receive_ballots()
            self._cut.is_agreed = True
        self.announce()
        self._announced = False
        self._passes += 1

    def vote_action(self, action: OptimizerAction, optimizers: Collection[str]) -> None:
        """Vote on an action on some of several optimizers, which all members have to take now.

        Raises UnequalPasses on all if votes differ; for an update HyperparametersDiffer too.
        """
        mask = sum(1 << self._hyper.names.index(name) for name in optimizers)
        applied = self._applied() if action is OptimizerAction.UPDATE else ()
        self._cast(StepVote(action=action, optimizers=mask, hyperparameters=applied))
        ballots = self._receive_ballots()
        if need_whole_votes(ballots):
            self._compare(self._step)

    def _applied(self) -> Values:
        return with_norms(self._hyper.current_values(), self._position.norms)

    # --- votes on a step, or on a round of steps ---

    def propose(self, *, is_faulty: bool = False, idle: Sequence[str] = ()) -> None:
        """Vote for the step, after all of its passes, unless this member has voted already.

        `is_faulty`: own gradients are not finite. `idle`: parameters without a gradient.
        """
        if self._words.has_sent or self._settled:
            return
        exchanges, refusal = self._position.exchanges, self._position.inspection.refusal
        exchanges.end_passes()
        wish = self._position.wish
        self._cast(
            StepVote(
                passes=self._passes,
                is_last=True,
                hyperparameters=self._applied(),
                idle=tuple(idle),
                layers=exchanges.summary(),
                weight=self.weights.own,
                is_faulty=is_faulty,
                stops_before=wish is not None and wish <= self._step,
                stops_after=wish == self._step + 1,
                leaves=self._position.leaves(),
                conflict=self._hyper.conflict(self._step),
                refusal=None if refusal is None else refusal.to_dict(),
            )
        )

    def settle(self) -> float | None:
        """Vote, unless this member has voted, and wait for all votes.

        Returns the factor by which to multiply gradients; None if the step was settled before.
        After `reopen`, members vote on the hyperparameters once more.
        Raises on all members: UnequalPasses, HyperparametersDiffer or InvalidSpec if votes differ;
        a member's refusal; StepStopped if a script has stopped before the step.
        """
        if self._settled:
            self._confirm()
            return None
        self.propose()
        rows = self._words.receive_values()
        self._settled = True
        if agree(rows):
            self.faults = [False] * len(rows)
            factor = 1.0
        else:
            ballots = [Ballot(*row) for row in rows]
            self.faults = [each.has(Flag.FAULTY) for each in ballots]
            factor = self._settle_ballots(ballots)
        self._hyper.apply(self._step)
        self._cut.commit()
        return factor

    def reopen(self) -> None:
        """Let the script go on if the step is settled: `settle` is to be called again on all
        members, as the script may change hyperparameters."""
        self._reopened = self._settled

    def _confirm(self) -> None:
        if self._reopened:
            self._reopened = False
            # Without `Hyperparameters.conflict`: a repeated step is compared by its first vote.
            own = StepVote(passes=self._passes, is_last=True, hyperparameters=self._applied())
            self._cast(own)
            if need_whole_votes(self._receive_ballots()):
                self._compare(self._step)

    def _settle_ballots(self, ballots: Sequence[Ballot]) -> float:
        self._check_passes(ballots)
        stops = any(each.has(Flag.STOPS_BEFORE) for each in ballots)
        if need_whole_votes(ballots):
            self._compare(self._step, is_taken=not stops)
        if stops:
            self._position.agree_to_stop(self._step)
            raise StepStopped(f"after {self._step} steps")
        if any(each.has(Flag.STOPS_AFTER) for each in ballots):
            self._position.agree_to_stop(self._step + 1)
        if any(each.has(Flag.LEAVES) for each in ballots):
            self._position.checkpoint_at = self._step + 1
        try:
            weights = weights_of(dict(zip(self._members, ballots, strict=True)), self._step)
        except InvalidSpec:
            barrier_after_collective(self._group)
            raise
        return 1.0 if weights is None else self.weights.factor(weights)

    def settle_round(self, applied: Mapping[int, Values], conflict: str) -> None:
        """Vote on the hyperparameters of a round's local steps.

        `applied`: the hyperparameters by step. `conflict`: see `Hyperparameters.conflict`. Raises
        HyperparametersDiffer on all members if values differ, or a member has a conflict.
        """
        first, *later = _changes(applied)
        after = max(applied) + 1
        wish = self._position.wish
        self._cast(
            StepVote(
                is_last=True,
                hyperparameters=first[1],
                changes=tuple((step - first[0], values) for step, values in later),
                stops_before=wish is not None and wish <= after,
                leaves=self._position.leaves(),
                conflict=conflict,
            )
        )
        ballots = self._receive_ballots()
        if need_whole_votes(ballots):
            self._compare(first[0])
        if any(each.has(Flag.STOPS_BEFORE) for each in ballots):
            self._position.agree_to_stop(after)
        if any(each.has(Flag.LEAVES) for each in ballots):
            self._position.checkpoint_at = after

    # --- exchange ---

    def _cast(self, vote: StepVote) -> None:
        if self._steps > 1 and self._words.may_share:
            # In the first step this would lengthen the stop after a member was lost.
            self._words.enable_shared_memory()
        self._vote, applied = vote, vote.applied
        if applied and applied != self._digested[0]:
            self._digested = (applied, digest_of(applied))
        self._words.send_values(vote.ballot(self._digested[1] if applied else 0))

    def _receive_ballots(self) -> Sequence[Ballot]:
        ballots = [Ballot(*row) for row in self._words.receive_values()]
        self._check_passes(ballots)
        return ballots

    def _check_passes(self, ballots: Sequence[Ballot]) -> None:
        if all(each.passes == ballots[0].passes for each in ballots):
            return
        barrier_after_collective(self._group)
        by_member = dict(zip(self._members, ballots, strict=True))
        check_passes(by_member, self._step, self._hyper.names)

    def _compare(self, step: int, *, is_taken: bool = True) -> None:
        exchanges = self._position.exchanges.record()
        own = replace(self._vote, exchanges=None if exchanges is None else vars(exchanges)).encode()
        alone = len(self._members) == 1
        votes = map(StepVote.decode, [own] if alone else gather(own, self._group))
        barrier_after_collective(self._group)
        check_votes(dict(zip(self._members, votes, strict=True)), step, is_taken=is_taken)

    def cut(self, reason: str) -> None:
        """Make this member's waits for votes raise. Thread-safe."""
        self._words.cut(reason)

    def close(self) -> None:
        """Release the memory."""
        self._words.close()


def _changes(applied: Mapping[int, Values]) -> list[tuple[int, Values]]:
    changes: list[tuple[int, Values]] = []
    for step, values in sorted(applied.items()):
        if not changes or changes[-1][1] != values:
            changes.append((step, values))
    return changes
