"""Finds out that the members' scripts wait for each other in different places.

A member that makes a call alone which all make together (`if session.is_first:
session.evaluate(...)`) waits for the others there, and they wait for it in their next step. Nothing
of that is an error to anybody, and it would last until a collective's limit. So whoever has waited
for some time says in the generation's store where it stands, and who is in such a call looks where
the others do. Where they agree nobody writes anything: most waits are far shorter.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from shoal.layouts.layer_exchanges import (
    LayerExchanges,
    Told,
    difference,
    different_layers,
    in_words,
)
from shoal.torch_private.c10d import Store
from shoal_proto.errors import InvalidSpec, ShoalError

log = structlog.get_logger(__name__)

LOOK_AFTER_S = 2.0
"""A wait that lasts longer is looked into."""
LOOKS_WITHIN_LIMIT = 6
"""Where a limit is short, a wait is looked into in time for all to hear of it."""
NEXT_LOOK = 1.25
"""Looks into one wait grow apart by this."""
HEARD_WITHIN_S = 10.0
"""A member is given so long to hear what the others know already."""
_HEARD_EVERY_S = 0.1
_PLACE, _VERDICT, _HEARD = "script/place/{}", "script/verdict", "script/heard"
_EXCHANGES, _OF_LAYERS = "script/exchanges/{}", "script/of-layers"
_REFUSAL = "script/refusal"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a script waits for the others."""

    step: int
    """Steps that are committed."""
    num_calls: int
    """Calls that were made together behind the last of them."""
    what: str
    """In words; empty where it may still come to a call, or is nowhere in particular."""
    is_call: bool = False
    """Whether it is a call that all members make together."""


class ScriptPlaces:
    """One member's part in it, for one generation. All but `refusal` and `tell` is the watch's
    thread's."""

    def __init__(
        self,
        store: Store,
        generation: int,
        rank: int,
        members: Sequence[str],
        *,
        exchanges: LayerExchanges | None = None,
        limit_s: float = math.inf,
        heard_within_s: float = HEARD_WITHIN_S,
    ) -> None:
        """`members` by rank. `exchanges`: of this one. `limit_s`: a wait for longer ends the
        generation, and with it what could be found."""
        self._look_after_s = min(LOOK_AFTER_S, limit_s / LOOKS_WITHIN_LIMIT)
        self._exchanges = exchanges
        self._heard_within_s = heard_within_s
        self._store = store
        self._generation = generation
        self._rank = rank
        self._members = members
        self._told: Place | None = None
        self._next_look_s = self._next_exchange_look_s = 0.0
        self._read: list[Place] = []
        self._found = ""
        self._of_layers = False
        """Whether what was found is of the layers within a pass."""
        self._told_refusal: InvalidSpec | None = None
        if exchanges is not None:
            exchanges.tell = self.tell

    def look(self, place: Place, waited_s: float, stood_s: float = 0.0) -> bool:
        """The trainer has waited there for so long, but for pauses, and for so long in all: whether
        its wait is in vain, which all members know then."""
        if self._found:
            return False
        try:
            if self._told not in (None, place):
                self._withdraw()
            if not place.what or waited_s < self._look_after_s:
                self._next_look_s = 0.0
            elif waited_s >= self._next_look_s:
                self._next_look_s = waited_s * NEXT_LOOK
                self._compare(place)
            if not self._found:
                self._look_at_exchanges(stood_s)
        except ShoalError as error:
            # No coordinator, or the generation is over: whatever is wrong is found otherwise.
            log.debug("script_places_unknown", reason=str(error)[:200])
        return bool(self._found)

    def refusal(self, generation: int) -> InvalidSpec | None:
        """What the script is told of a wait in that generation that was in vain. Any thread."""
        if not self._found or generation != self._generation:
            return None
        if self._told_refusal is not None:
            return self._told_refusal
        if self._of_layers:
            return different_layers(self._found)
        return InvalidSpec(
            "the members' scripts wait for each other in different places",
            seen=self._found,
            expected="the same calls in the same order on every member",
            fix="session.evaluate, session.all_reduce and, under strategies that spread the model,"
            " session.state_dict take all members: call them outside of `if session.is_first`, and"
            " use what they return there. session.gather takes all members as often in each step."
            " What one member does alone belongs into session.pause.",
        )

    def tell(self, refusal: InvalidSpec) -> None:
        """The trainer is about to leave with this, which members that wait for it do not know of.
        Returns once all know it; not, if it takes too long."""
        # From now on this member's watch has nothing to find.
        self._found, self._told_refusal = refusal.seen, refusal
        parts = {"what": refusal.what, "seen": refusal.seen}
        parts |= {"expected": refusal.expected, "fix": refusal.fix}
        try:
            self._store.set(_REFUSAL, json.dumps(parts))
            # For members that know of no other kind.
            self._store.set(_OF_LAYERS, "1")
            self._store.set(_VERDICT, refusal.seen)
            self._await_all()
        except ShoalError as error:
            log.debug("refusal_not_told", reason=str(error)[:200])

    def _withdraw(self) -> None:
        self._store.delete_key(_PLACE.format(self._rank))
        self._told, self._read = None, []

    def _compare(self, place: Place) -> None:
        if self._told is None:
            self._store.set(_PLACE.format(self._rank), json.dumps(vars(place)))
            self._told = place
        if place.is_call:
            self._look_around()
        self._hear()

    def _hear(self) -> None:
        """Take what anybody has found, if somebody has."""
        if self._store.check([_VERDICT]):
            self._of_layers = self._store.check([_OF_LAYERS])
            if self._store.check([_REFUSAL]):
                self._told_refusal = InvalidSpec(**json.loads(self._store.get(_REFUSAL)))
            # First: the others may have gone before all is said.
            self._found = self._store.get(_VERDICT).decode()
            self._await_all()

    def _look_at_exchanges(self, stood_s: float) -> None:
        """Who splits layers tells where it has met the others for them. No limit has to run for
        that: where scripts do the same, what one member has met others for is where another is or
        has been, however slow they are and whatever is lost between them."""
        exchanges = self._exchanges
        finds = exchanges is not None and (exchanges.peers or exchanges.is_told)
        if exchanges is None or not finds or stood_s < self._look_after_s:
            self._next_exchange_look_s = 0.0
            return
        if stood_s < self._next_exchange_look_s:
            return
        self._next_exchange_look_s = stood_s * NEXT_LOOK
        told = exchanges.told()
        if told is not None:
            self._store.set(_EXCHANGES.format(self._rank), json.dumps(vars(told)))
            self._compare_exchanges(exchanges.peers)
        self._hear()

    def _compare_exchanges(self, peers: Sequence[int]) -> None:
        keys = [_EXCHANGES.format(rank) for rank in peers]
        if not self._store.check(keys):
            return
        words = [Told(**json.loads(word)) for word in self._store.multi_get(keys)]
        names = [self._members[rank] for rank in peers]
        found = difference(dict(zip(names, words, strict=True)))
        if found is not None:
            self._store.set(_OF_LAYERS, "1")
            self._store.set(_VERDICT, in_words(found))

    def _look_around(self) -> None:
        keys = [_PLACE.format(rank) for rank in range(len(self._members))]
        if not self._store.check(keys):
            self._read = []
            return
        places = [Place(**json.loads(word)) for word in self._store.multi_get(keys)]
        # Twice in a row, so that nobody has just gone on.
        before, self._read = self._read, places
        together = len({(each.step, each.num_calls) for each in places}) == 1
        if together and places == before and len({each.what for each in places}) > 1:
            words = zip(self._members, places, strict=True)
            self._store.set(_VERDICT, "; ".join(f"{name}: {each.what}" for name, each in words))

    def _await_all(self) -> None:
        """Whoever leaves first ends the generation, and with it what the others could hear."""
        self._store.add(_HEARD, 1)
        give_up_s = time.monotonic() + self._heard_within_s
        while self._store.add(_HEARD, 0) < len(self._members) and time.monotonic() < give_up_s:
            time.sleep(_HEARD_EVERY_S)
