"""Whether all members take a step in the same way: one small message before it is committed.

A member with another number of backward passes would have its collectives paired with others' next
step; one with another learning rate would drift away. Neither is an error to anybody by itself. So
before any further pass, and before the step is applied, each member says how many passes it has
begun, whether these were all, and a digest of its hyperparameters. Whoever says something else than
the others is met by them there, and by nothing else.
"""

import enum
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shoal.backends.abortable.last_word import let_all_hear
from shoal.backends.shared_memory.words import Words
from shoal.layouts.layer_exchanges import compare
from shoal.state.resharding import gather
from shoal.strategies.synchronous.hyperparameters import (
    Hyperparameters,
    Values,
    by_value,
    differences,
    digest_of,
    in_words,
    with_norms,
)
from shoal.strategies.synchronous.script_position import ScriptPosition, Stopped
from shoal.strategies.synchronous.step_weights import BY_SAMPLES, StepWeights
from shoal_proto.errors import HyperparametersDiffer, InvalidSpec, UnequalPasses

NUM_WORDS = 4
"""Passes, twice, and one more if these were all, or parts, as a negative number; digest; whether a
step comes again otherwise; what the losses weigh."""


class Deed(enum.IntEnum):
    """What is done with some of several optimizers."""

    PASS = 0
    UPDATE = 1
    CLIP = 2


class StepCut:
    """Into how many parts a step is cut, all of whose gradients are reduced with the last one.

    Members that cut a step in other ways would begin other collectives: in the first pass one
    would reduce and another would not. So each step begins as the last one did, and whoever wants
    another way says so where all listen. Behind a step without parts nobody says anything before
    the first pass, which is then reduced on its own, also that of a part; behind one with parts all
    do. Where members work on the same samples all always do: what they send each other in the first
    forward pass has the shape of a part.
    """

    def __init__(self, *, shares_samples: bool = False) -> None:
        self.shares_samples = shares_samples
        self._last = 1
        """Parts of the last step that was committed; 1 for one that was not cut."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.num_parts = 1
        self.is_agreed = False
        """Whether all members have said that they cut this step in the same way."""

    def begin_part(self, index: int, num_parts: int) -> bool:
        """The next pass is that of one of so many parts; whether it is to be reduced."""
        self.num_parts = num_parts
        is_alone = index == 0 and self._last == 1 and not self.shares_samples
        return index == num_parts - 1 or is_alone

    @property
    def word(self) -> int:
        """What is said of it."""
        return -self.num_parts

    @property
    def is_told_first(self) -> bool:
        """Whether it is still to be told, before the first backward pass."""
        return (self._last > 1 or self.shares_samples) and not self.is_agreed

    @property
    def says_all_passes(self) -> bool:
        """Whether all members know how many passes each of them makes."""
        return self.is_agreed and self.num_parts > 1

    def commit(self) -> None:
        """The step is taken by all members."""
        self._last = self.num_parts


_MAX_IDLE_NAMED = 5
_NAMED = 1 << 40
"""A word from here on names optimizers, and what is done with them."""
_DEEDS = ("a backward pass for", "an update of", "clipping for")
_BITS = 16

_CONFLICT, _STOP_BEFORE, _STOP_BEHIND, _FAULT, _LEAVES, _REFUSAL = 1, 2, 4, 8, 16, 32
"""In the third word."""
_FLAG_BITS = 8
"""Behind so many bits the third word says for which layers a member has met its peers."""


class StepAgreement:
    """One member's part in it, for one generation."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[str],
        hyperparameters: Hyperparameters,
        position: ScriptPosition,
        *,
        shares_samples: bool = False,
    ) -> None:
        """`members` by rank. `shares_samples`: whether some of them work on the same ones."""
        self._group = group
        self._members = members
        self._hyper = hyperparameters
        self._position = position
        self._words = Words(group, NUM_WORDS)
        self._steps = 0
        self._step = 0
        self._passes = 0
        self._cut = StepCut(shares_samples=shares_samples)
        self.weights = StepWeights()
        self.faults: Sequence[bool] = ()
        """Which members have proposed this step with gradients that are not finite, by rank, once
        it is settled."""
        self._announced = False
        self._settled = False
        self._conflict = ""
        self._idle: Sequence[str] = ()

    def begin(self, step: int) -> None:
        """A step begins, after so many committed ones."""
        self._step = step
        self._passes = 0
        self._cut.begin()
        self.weights.begin()
        self._position.exchanges.begin()
        self._announced = False
        self._words.forget()
        self._settled = False
        self._conflict = ""
        self._idle = ()
        self._steps += 1

    @property
    def members(self) -> Sequence[str]:
        """By rank."""
        return self._members

    @property
    def is_first_step(self) -> bool:
        """Whether it is the first one of the generation."""
        return self._steps == 1

    def begin_part(self, index: int, num_parts: int) -> bool:
        """The next pass is that of one of so many parts; whether it is to be reduced."""
        return self._cut.begin_part(index, num_parts)

    def tell_parts(self) -> None:
        """A forward pass begins. Behind a step that was cut into parts, members say before the
        first backward pass into how many this one is cut; members with the same samples always do,
        and before the first forward pass. Raises UnequalPasses, on all of those, if it differs."""
        if self._cut.is_told_first and not self._words.is_told:
            self._send(self._cut.word, 0, conflict=False)
            if self._cut.shares_samples:
                self._compare_passes(self._words.hear())
                self._cut.is_agreed = True

    def announce(self) -> None:
        """A forward pass begins that communicates. Behind a backward pass it is one of a further
        pass, which all members have to make. Raises UnequalPasses on all if some do not."""
        if self._passes and not self._announced and not self._cut.says_all_passes:
            self._announced = True
            is_cut = self._cut.num_parts > 1
            self._send(self._cut.word if is_cut else 2 * (self._passes + 1), 0, conflict=False)
            self._compare_passes(self._words.hear())
            self._cut.is_agreed |= is_cut

    def passing(self) -> None:
        """A backward pass begins. Raises as `announce`, before anything of it is sent."""
        self.tell_parts()
        if self._words.is_told:
            self._compare_passes(self._words.hear())
            self._cut.is_agreed = True
        self.announce()
        self._announced = False
        self._passes += 1

    def meet(self, deed: Deed, optimizers: Collection[str]) -> None:
        """Return if all members do this now with the same ones of several optimizers.

        Raises UnequalPasses on all of them if not; for an update also HyperparametersDiffer.
        """
        mask = sum(1 << self._hyper.names.index(name) for name in optimizers)
        digest = self._hyper.digest() if deed is Deed.UPDATE else 0
        self._send(_NAMED + (deed << _BITS) + mask, self._with_norms(digest), conflict=False)
        rows = self._words.hear()
        self._compare_passes(rows)
        if any(row[1] != rows[0][1] for row in rows):
            self._compare_values([(self._step, self._values())])

    def _with_norms(self, digest: int) -> int:
        """This digest, where the script has clipped also of to what."""
        norms = self._position.norms
        return digest ^ digest_of(norms) if norms else digest

    def _values(self) -> Values:
        return with_norms(self._hyper.now(), self._position.norms)

    def propose(self, *, is_faulty: bool = False, idle: Sequence[str] = ()) -> None:
        """All passes of the step were made: say so, and with what it is to be applied. `is_faulty`:
        this member's own gradients are not finite. `idle`: parameters without a gradient, which
        have to be the same ones on all members. Of a settled step nothing more is said."""
        if not self._words.is_told and not self._settled:
            self._conflict = self._hyper.conflict(self._step)
            word = 2 * self._passes + 1
            self._position.exchanges.end()
            exchanged = self._position.exchanges.word() << _FLAG_BITS
            refused = _REFUSAL * (self._position.inspection.refusal is not None)
            more = self._ending(self._step) | _FAULT * is_faulty | refused | exchanged
            self._idle = idle
            digest = self._with_norms(self._hyper.digest() ^ (digest_of(idle) if idle else 0))
            self._send(word, digest, conflict=bool(self._conflict), more=more)

    def _ending(self, step: int) -> int:
        """Flags of this member that end the job, or its run, with the step behind so many."""
        leaves = _LEAVES if self._position.leaves() else 0
        wish = self._position.wish
        if wish is None or wish > step + 1:
            return leaves
        return leaves | (_STOP_BEFORE if wish <= step else _STOP_BEHIND)

    def settle(self) -> float | None:
        """Return if all members take the step in the same way, and wait for that: by what the
        gradients are to be multiplied before they are used. None if that was told before.

        Raises UnequalPasses, HyperparametersDiffer, InvalidSpec, or what one of them refuses,
        on all of them.
        """
        if self._settled:
            return None
        self.propose()
        rows = self._words.hear()
        self._settled = True
        self.faults = [bool(row[2] & _FAULT) for row in rows]
        factor = 1.0 if _says_nothing_more(rows) else self._compare(rows)
        self._hyper.apply(self._step)
        self._cut.commit()
        return factor

    def _compare(self, rows: Sequence[Sequence[int]]) -> float:
        """See `settle`."""
        self._compare_passes(rows)
        if any(row[2] & _REFUSAL for row in rows):
            self._position.inspection.raise_on_all(self._group)
        words = [row[2] >> _FLAG_BITS for row in rows]
        compare(self._position.exchanges, words, self._group, self._members)
        if any(row[2] & _STOP_BEFORE for row in rows):
            self._position.agree_to_stop(self._step)
            raise Stopped(f"behind {self._step} steps")
        if any(row[1] != rows[0][1] or row[2] & _CONFLICT for row in rows):
            self._compare_values([(self._step, self._values())])
        if any(row[2] & _STOP_BEHIND for row in rows):
            self._position.agree_to_stop(self._step + 1)
        if any(row[2] & _LEAVES for row in rows):
            self._position.checkpoint_at = self._step + 1
        return self._factor([row[3] for row in rows])

    def _factor(self, words: Sequence[int]) -> float:
        if all(map(BY_SAMPLES.__eq__, words)):
            return 1.0
        weights = self.weights.said(words)
        known = [weight for weight in weights if weight is not None]
        if not known:
            return 1.0
        if len(known) == len(weights) and any(known):
            return self.weights.factor(known)
        let_all_hear(self._group)
        if len(known) == len(weights):
            raise InvalidSpec(
                f"the losses of step {self._step} weigh nothing",
                seen="weight=0 on every member",
                expected="session.backward(loss, weight=...) with a weight above 0 somewhere",
            )
        said = dict(zip(self._members, weights, strict=True))
        raise InvalidSpec(
            f"some losses of step {self._step} have a weight, others have none",
            seen=by_value({k: "by samples" if v is None else "weight=" for k, v in said.items()}),
            expected="session.backward(loss, weight=...) on every member, or on none",
        )

    def settle_round(self, applied: Mapping[int, Values], conflict: str) -> None:
        """Return if all members applied the same in each step of a round in which they stepped by
        themselves: `applied`, by step. `conflict`: see `Hyperparameters`.

        Raises HyperparametersDiffer, on all members.
        """
        changes = _changes(applied)
        self._conflict = conflict
        behind = max(applied) + 1
        self._send(1, digest_of(changes), conflict=bool(conflict), more=self._ending(behind))
        rows = self._words.hear()
        if any(row[1] != rows[0][1] or row[2] & _CONFLICT for row in rows):
            self._compare_values(changes)
        if any(row[2] & _STOP_BEFORE for row in rows):
            self._position.agree_to_stop(behind)
        if any(row[2] & _LEAVES for row in rows):
            self._position.checkpoint_at = behind

    # --- messages ---

    def _send(self, word: int, digest: int, *, conflict: bool, more: int = 0) -> None:
        if self._steps > 1 and self._words.may_share:
            # Not in the first step, for which members stand still that were just left by another.
            self._words.share()
        self._words.tell([word, digest, conflict * _CONFLICT | more, self.weights.word()])

    def cut(self, reason: str) -> None:
        """Let this member wait for no word of the others. Any thread."""
        self._words.cut(reason)

    def close(self) -> None:
        """The generation is over for this member."""
        self._words.close()

    def _compare_passes(self, rows: Sequence[Sequence[int]]) -> None:
        words = [row[0] for row in rows]
        if len(set(words)) == 1:
            return
        said = zip(self._members, words, strict=True)
        counts = {name: self._in_words(word) for name, word in said}
        let_all_hear(self._group)
        if any(word >= _NAMED for word in words):
            raise UnequalPasses(
                f"the members do different things with their optimizers in step {self._step}",
                seen=by_value(counts),
                expected="the same backward passes and updates in the same order on every member",
                details=counts,
            )
        raise UnequalPasses(
            f"the members make different numbers of backward passes in step {self._step}",
            seen=by_value(counts),
            expected="as many on every member: their gradients are summed up pass by pass",
            fix="Cut each share into a number of parts that does not depend on its size, as `for"
            " part in batch.parts(4)` does, with the same number on every member"
            " (inputs.split(11) cuts 34 samples into 4 and 33 into 3, tensor_split(4) does not).",
            details=counts,
        )

    def _in_words(self, word: int) -> str:
        """What a member has said of its passes."""
        if word < _NAMED:
            return _in_words(word)
        deed, mask = divmod(word - _NAMED, 1 << _BITS)
        named = (name for bit, name in enumerate(self._hyper.names) if mask >> bit & 1)
        return f"{_DEEDS[deed]} {' and '.join(named)}"

    def _compare_values(self, applied: Sequence[tuple[int, Values]]) -> None:
        """Collective; returns if what differs are last bits."""
        more = {"idle": [*self._idle]} if self._idle else {}
        own = json.dumps({"applied": applied, "conflict": self._conflict, **more}, default=repr)
        alone = len(self._members) == 1
        words = [own.encode()] if alone else gather(own.encode(), self._group)
        told = [json.loads(word) for word in words]
        let_all_hear(self._group)
        said = dict(zip(self._members, told, strict=True))
        self._compare_idle({name: each.get("idle", []) for name, each in said.items()})
        conflicts = {name: each["conflict"] for name, each in said.items() if each["conflict"]}
        if conflicts:
            name, conflict = next(iter(conflicts.items()))
            raise _differ(
                "a step is taken again, with other hyperparameters than before",
                seen=f"{conflict} (of {name})",
                details=conflicts,
            )
        for step in sorted({step for each in told for step, _ in each["applied"]}):
            found = differences({name: _at(each["applied"], step) for name, each in said.items()})
            if found:
                raise _differ(
                    f"the members would apply different hyperparameters in step {step}",
                    seen=in_words(found),
                    details={field: by_value(values) for field, values in found.items()},
                )

    def _compare_idle(self, idle: Mapping[str, Sequence[str]]) -> None:
        """One that leaves a layer out gathers and reduces others than its peers do meanwhile."""
        everywhere = set.intersection(*map(set, idle.values()))
        own = {
            name: [each for each in some if each not in everywhere] for name, some in idle.items()
        }
        if not any(own.values()):
            return
        names = {name: ", ".join(some[:_MAX_IDLE_NAMED]) or "none" for name, some in own.items()}
        raise InvalidSpec(
            f"the members computed with different parameters in step {self._step}",
            seen=f"without a gradient: {by_value(names)}",
            expected="the same layers in each pass on every member: they gather and reduce these"
            " together",
            fix="Call a layer that a member's samples do not need with none of them (inputs[:0]),"
            " and add its sum to the loss; or use shoal.DDP(find_unused_parameters=True) or"
            " shoal.Zero1(find_unused_parameters=True). Where the script drops gradients"
            " (parameter.grad = None), let it drop the same on every member.",
        )


def _says_nothing_more(rows: Sequence[Sequence[int]]) -> bool:
    """Whether all members have told the same of a step, as in nearly all of them, and no more than
    that they take it."""
    first = rows[0]
    flags, weights = first[2] & ((1 << _FLAG_BITS) - 1), first[3:]
    return not flags and all(map(BY_SAMPLES.__eq__, weights)) and rows.count(first) == len(rows)


def _changes(applied: Mapping[int, Values]) -> list[tuple[int, Values]]:
    """The first step of each run of steps with the same values."""
    found: list[tuple[int, Values]] = []
    for step, values in sorted(applied.items()):
        if not found or found[-1][1] != values:
            found.append((step, values))
    return found


def _in_words(word: int) -> str:
    """How many passes a member has said that it makes."""
    if word < 0:
        return f"{-word} (batch.parts)" if word < -1 else "1 or more"
    return str(word // 2) + ("" if word % 2 else " or more")


def _at(changes: Sequence[tuple[int, Any]], step: int) -> Any:
    return next(values for began, values in reversed(changes) if began <= step)


def _differ(what: str, **parts: Any) -> HyperparametersDiffer:
    return HyperparametersDiffer(
        what,
        expected="the same on every member in every step, also when it is taken again",
        fix="Let session.register carry what they come from, as it does torch's schedulers, or set"
        " them from batch.step before each step. What counts its own calls starts over on a member"
        " that joins, and counts a step that is taken again twice (docs/strategies.md).",
        **parts,
    )
