"""A member's vote on a step: its passes, and the values with which the step is to be applied.

The passes are in the ballot itself, not in a further exchange: members with different passes are
about to run different collectives. If digests differ, or a member reports a conflict or a refusal,
members exchange whole votes. Pure: `StepAgreement` sends and receives.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from shoal.backends.abortable.gather import record_from, record_of_json
from shoal.backends.shared_memory.messages import bits_of, number_of
from shoal.layouts.layer_exchanges import ExchangeRecord, check_exchanges, ranks_that_differ
from shoal.strategies.synchronous.hyperparameters import (
    Values,
    by_value,
    describe_differences,
    differences,
)
from shoal_proto.errors import HyperparametersDiffer, InvalidSpec, ShoalError, UnequalPasses

MAX_IDLE_NAMED = 5
_NAMED = 1 << 40
"""Lowest value of a ballot's `passes` that encodes an action and its optimizers, not passes."""
_ACTION_BITS = 16
_BY_SAMPLES = -1.0
_LAYERS_FROM = 8
"""First bit of the layers' digest in `flags_and_layers`; flags are below it."""


class OptimizerAction(enum.IntEnum):
    """Actions of a script on some of several optimizers."""

    BACKWARD = 0
    UPDATE = 1
    CLIP = 2


_IN_WORDS = ("a backward pass for", "an update of", "clipping for")


class Flag(enum.IntFlag):
    """Parts of a ballot that may differ between members."""

    CONFLICT = 1
    STOPS_BEFORE = 2
    STOPS_AFTER = 4
    FAULTY = 8
    LEAVES = 16
    REFUSES = 32


class Ballot(NamedTuple):
    """The integers in which a vote is sent, of 64 bits each.

    `passes`: minus the number of parts; or twice the number of passes, plus 1 in the vote on the
    step; or, from `_NAMED` on, an action and its optimizers. `flags_and_layers`: flags in the
    lowest 8 bits, then `StepVote.layers`. `weight`: the bits of a float64; -1.0 if losses are
    weighted by samples.
    """

    passes: int
    digest: int
    flags_and_layers: int
    weight: int

    @property
    def layers(self) -> int:
        return self.flags_and_layers >> _LAYERS_FROM

    def has(self, flag: Flag) -> bool:
        return bool(self.flags_and_layers & flag)


NUM_WORDS = len(Ballot._fields)
BY_SAMPLES = bits_of(_BY_SAMPLES)


@dataclass(frozen=True, kw_only=True)
class StepVote:
    """A member's vote. Comparison ignores fields that may differ between members."""

    passes: int = 0
    is_last: bool = False
    parts: int = 0
    """Number of parts of the step; 0 if the vote is not about parts."""
    action: OptimizerAction | None = None
    """None if the vote is not about an action."""
    optimizers: int = 0
    """Bit mask, in the order of the optimizers' names."""
    hyperparameters: Values = ()
    changes: tuple[tuple[int, Values], ...] = ()
    """The index in the round of each step with new values, and these values."""
    idle: tuple[str, ...] = ()

    layers: int = field(default=0, compare=False)
    """`LayerExchanges.summary`: the same on members that split layers with each other."""
    weight: float | None = field(default=None, compare=False)
    """None: losses are weighted by samples."""
    is_faulty: bool = field(default=False, compare=False)
    stops_before: bool = field(default=False, compare=False)
    stops_after: bool = field(default=False, compare=False)
    leaves: bool = field(default=False, compare=False)
    """True if the member leaves after this step and no other replaces it."""
    conflict: str = field(default="", compare=False)
    """See `Hyperparameters.conflict`."""
    refusal: Mapping[str, Any] | None = field(default=None, compare=False)
    """Refusal of the optimizer's state after the latest step, as a dict."""
    exchanges: Mapping[str, Any] | None = field(default=None, compare=False)
    """`LayerExchanges.record`; in whole votes only."""

    @property
    def applied(self) -> tuple[Any, ...]:
        """The content of the ballot's digest; empty in a vote without such values."""
        content = (self.hyperparameters, self.changes, self.idle)
        return content if any(content) else ()

    def ballot(self, digest: int) -> Ballot:
        """Return the ballot of this vote. `digest`: the digest of `applied`, below 2**56."""
        flags = (
            Flag.CONFLICT * bool(self.conflict)
            | Flag.STOPS_BEFORE * self.stops_before
            | Flag.STOPS_AFTER * self.stops_after
            | Flag.FAULTY * self.is_faulty
            | Flag.LEAVES * self.leaves
            | Flag.REFUSES * (self.refusal is not None)
        )
        weight = BY_SAMPLES if self.weight is None else bits_of(self.weight)
        return Ballot(self._passes_number(), digest, flags | self.layers << _LAYERS_FROM, weight)

    def _passes_number(self) -> int:
        if self.action is not None:
            return _NAMED + (self.action << _ACTION_BITS) + self.optimizers
        return -self.parts if self.parts else 2 * self.passes + self.is_last

    def encode(self) -> bytes:
        return json.dumps(vars(self), default=repr).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Decode a whole vote. Fields of a later release are ignored."""
        return record_of_json(cls, encoded)


def agree(ballots: Sequence[Sequence[int]]) -> bool:
    """True if all ballots are equal, without flags or weights, as in nearly every step."""
    first = ballots[0]
    flags, weight = first[2] & ((1 << _LAYERS_FROM) - 1), first[3]
    return not flags and weight == BY_SAMPLES and ballots.count(first) == len(ballots)


def check_passes(ballots: Mapping[str, Ballot], step: int, optimizers: Sequence[str]) -> None:
    """Raise UnequalPasses unless all members make the same passes, or take the same action.

    `optimizers`: all names, in the order of the bits.
    """
    passes = [each.passes for each in ballots.values()]
    if passes.count(passes[0]) == len(passes):
        return
    counts = {name: _passes_in_words(each.passes, optimizers) for name, each in ballots.items()}
    if any(each >= _NAMED for each in passes):
        raise UnequalPasses(
            f"the members take different actions with their optimizers in step {step}",
            seen=by_value(counts),
            expected="the same backward passes and updates in the same order on every member",
            details=counts,
        )
    raise UnequalPasses(
        f"the members make different numbers of backward passes in step {step}",
        seen=by_value(counts),
        expected="the same number on every member: gradients are summed pass by pass",
        fix="Cut each share into a number of parts that does not depend on its size, as `for"
        " part in batch.parts(4)` does, with the same number on every member"
        " (inputs.split(11) cuts 34 samples into 4 and 33 into 3, tensor_split(4) does not).",
        details=counts,
    )


def _passes_in_words(number: int, optimizers: Sequence[str]) -> str:
    if number >= _NAMED:
        action, mask = divmod(number - _NAMED, 1 << _ACTION_BITS)
        named = (name for bit, name in enumerate(optimizers) if mask >> bit & 1)
        return f"{_IN_WORDS[action]} {' and '.join(named)}"
    if number < 0:
        return f"{-number} (batch.parts)" if number < -1 else "1 or more"
    return str(number // 2) + ("" if number % 2 else " or more")


def need_whole_votes(ballots: Sequence[Ballot]) -> bool:
    """True if a member reports a conflict or refuses the step, or if digests differ.

    Digests of layers are compared only among members that split layers with each other.
    """
    return (
        any(each.digest != ballots[0].digest for each in ballots)
        or any(each.has(Flag.CONFLICT | Flag.REFUSES) for each in ballots)
        or bool(ranks_that_differ([each.layers for each in ballots]))
    )


def check_votes(votes: Mapping[str, StepVote], step: int, *, is_taken: bool = True) -> None:
    """Raise unless the members' votes differ by rounding errors at most.

    Raises a member's refusal of the step, InvalidSpec, or HyperparametersDiffer. `is_taken`: False
    if a script has stopped before the step; values may then differ.
    """
    refusal = next((each.refusal for each in votes.values() if each.refusal is not None), None)
    if refusal is not None:
        raise ShoalError.from_dict(dict(refusal))
    exchanges = [each.exchanges for each in votes.values()]
    records = [None if each is None else record_from(ExchangeRecord, each) for each in exchanges]
    check_exchanges([each.layers for each in votes.values()], records, list(votes))
    if is_taken:
        _check_idle({name: each.idle for name, each in votes.items()}, step)
        _check_hyperparameters(votes, step)


def _check_hyperparameters(votes: Mapping[str, StepVote], step: int) -> None:
    conflicts = {name: each.conflict for name, each in votes.items() if each.conflict}
    if conflicts:
        name, conflict = next(iter(conflicts.items()))
        raise _differ(
            "a step is taken again, with other hyperparameters than before",
            seen=f"{conflict} (on {name})",
            details=conflicts,
        )
    applied = {name: [(0, v.hyperparameters), *v.changes] for name, v in votes.items()}
    for after in sorted({after for each in applied.values() for after, _ in each}):
        differing = differences({name: _applied_at(each, after) for name, each in applied.items()})
        if differing:
            raise _differ(
                f"the members would apply different hyperparameters in step {step + after}",
                seen=describe_differences(differing),
                details={field: by_value(values) for field, values in differing.items()},
            )


def _applied_at(applied: Sequence[tuple[int, Values]], after: int) -> Values:
    return next(values for began, values in reversed(applied) if began <= after)


def _check_idle(idle: Mapping[str, Sequence[str]], step: int) -> None:
    """Refuse gradients for different parameters: members would gather and reduce different
    layers.
    """
    everywhere = set.intersection(*map(set, idle.values()))
    own = {name: [each for each in some if each not in everywhere] for name, some in idle.items()}
    if not any(own.values()):
        return
    names = {name: ", ".join(some[:MAX_IDLE_NAMED]) or "none" for name, some in own.items()}
    raise InvalidSpec(
        f"the members computed with different parameters in step {step}",
        seen=f"without a gradient: {by_value(names)}",
        expected="the same layers in each pass on every member: they gather and reduce each"
        " layer together",
        fix="If a member's samples do not need a layer, call it with no samples (inputs[:0]), and"
        " add the sum of its outputs to the loss; or use shoal.DDP(find_unused_parameters=True) or"
        " shoal.Zero1(find_unused_parameters=True). If the script drops gradients"
        " (parameter.grad = None), drop the same on every member.",
    )


def weights_of(ballots: Mapping[str, Ballot], step: int) -> Sequence[float] | None:
    """Return the weight of each member's losses; None if they are weighted by samples.

    Raises InvalidSpec if only some of the members give weights, or if all weights are 0.
    """
    weights = {name: _weight_of(each) for name, each in ballots.items()}
    known = [each for each in weights.values() if each is not None]
    if not known:
        return None
    if len(known) < len(weights):
        described = {k: "by samples" if v is None else "weight=" for k, v in weights.items()}
        raise InvalidSpec(
            f"some losses of step {step} have a weight, others have none",
            seen=by_value(described),
            expected="session.backward(loss, weight=...) on every member, or on none",
        )
    if not any(known):
        raise InvalidSpec(
            f"the losses of step {step} all have weight 0",
            seen="weight=0 on every member",
            expected="session.backward(loss, weight=...) with a weight above 0 somewhere",
        )
    return known


def _weight_of(ballot: Ballot) -> float | None:
    weight = number_of(ballot.weight)
    return None if weight == _BY_SAMPLES else weight


def _differ(what: str, **parts: Any) -> HyperparametersDiffer:
    return HyperparametersDiffer(
        what,
        expected="the same on every member in every step, also when a step is taken again",
        fix="Set them from batch.step before each step; or, except under local-sgd and diloco, give"
        " session.register the object that sets them, such as one of torch's schedulers. An object"
        " that counts its own calls starts over on a member that joins, and counts a repeated step"
        " twice (docs/loop.md).",
        **parts,
    )
