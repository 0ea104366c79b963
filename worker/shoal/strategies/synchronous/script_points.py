"""Detection of members' scripts that wait for each other at different calls.

A member that makes a shared call alone (`if session.is_first: session.evaluate(...)`) waits in it,
while the others wait for that member in their next step. So a member that has waited for some time
writes its script's point to the generation's store. In a shared call it compares the points.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from shoal.backends.abortable.gather import record_of_json
from shoal.layouts.layer_exchanges import (
    ExchangeRecord,
    LayerExchanges,
    describe_exchanges,
    difference,
    different_layers,
)
from shoal.torch_private.c10d import Store
from shoal_proto.errors import InvalidSpec, ShoalError

log = structlog.get_logger(__name__)

LOOK_AFTER_S = 2.0
LOOKS_WITHIN_LIMIT = 6
"""A wait is examined after 1/`LOOKS_WITHIN_LIMIT` of a short limit, so that members are notified
before the limit ends."""
NEXT_LOOK = 1.25
READ_WITHIN_S = 10.0
"""Time that members have to read the finding before the generation ends."""
_READ_CHECK_S = 0.1
_POINT, _EXCHANGES = "script/point/{}", "script/exchanges/{}"
_REFUSAL, _NUM_READ = "script/refusal", "script/num-read"
_REFUSAL_PARTS = ("what", "seen", "expected", "fix")


@dataclass(frozen=True, kw_only=True)
class ScriptPoint:
    """The point at which a script waits for the others."""

    step: int
    num_calls: int
    """Number of shared calls made since the last committed step."""
    what: str
    """Description; empty if the script does not wait, or if its last call is unconfirmed."""
    is_call: bool = False
    """True if all members have to make this call together."""


class ScriptPoints:
    """A member's part in the detection, for one generation.

    The hang watch's thread calls all methods except `refusal` and `report_refusal`.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        rank: int,
        members: Sequence[str],
        *,
        exchanges: LayerExchanges | None = None,
        limit_s: float = math.inf,
        read_within_s: float = READ_WITHIN_S,
    ) -> None:
        """`members`: names by rank. `exchanges`: this member's exchanges in layers. `limit_s`:
        longest wait.
        """
        self._look_after_s = min(LOOK_AFTER_S, limit_s / LOOKS_WITHIN_LIMIT)
        self._exchanges = exchanges
        self._read_within_s = read_within_s
        self._store = store
        self._generation = generation
        self._rank = rank
        self._members = members
        self._published: ScriptPoint | None = None
        self._next_look_s = self._next_exchange_look_s = 0.0
        self._read: list[ScriptPoint] = []
        self._refusal: InvalidSpec | None = None
        if exchanges is not None:
            exchanges.report_refusal = self.report_refusal

    def check(self, point: ScriptPoint, waited_s: float, stood_s: float = 0.0) -> bool:
        """Examine a wait of the trainer at this point; return True, once, if it would never end.

        `waited_s`: its duration without pauses; `stood_s`: with pauses. On True all members have
        read the finding, or have had `read_within_s` for it.
        """
        if self._refusal is not None:
            return False
        try:
            if self._published not in (None, point):
                self._withdraw()
            if not point.what or waited_s < self._look_after_s:
                self._next_look_s = 0.0
            elif waited_s >= self._next_look_s:
                self._next_look_s = waited_s * NEXT_LOOK
                self._compare(point)
            if self._refusal is None:
                self._look_at_exchanges(stood_s)
        except ShoalError as error:
            # No coordinator, or the generation is over: other checks handle that.
            log.debug("script_points_unknown", reason=str(error)[:200])
        return self._refusal is not None

    def refusal(self, generation: int) -> InvalidSpec | None:
        """Return the scripts' error, found or reported in that generation, if any. Thread-safe."""
        return self._refusal if generation == self._generation else None

    def report_refusal(self, refusal: InvalidSpec) -> None:
        """Publish the error that is about to end this member's script.

        Returns once all members have read it, after `read_within_s`, or if the store does not
        answer.
        """
        # Once this is set, this member compares nothing any more.
        self._refusal = refusal
        try:
            self._publish(refusal)
            self._await_all()
        except ShoalError as error:
            log.debug("refusal_not_published", reason=str(error)[:200])

    def _publish(self, refusal: InvalidSpec) -> None:
        parts = {part: getattr(refusal, part) for part in _REFUSAL_PARTS}
        self._store.set(_REFUSAL, json.dumps(parts))

    def _withdraw(self) -> None:
        self._store.delete_key(_POINT.format(self._rank))
        self._published, self._read = None, []

    def _compare(self, point: ScriptPoint) -> None:
        if self._published is None:
            self._store.set(_POINT.format(self._rank), json.dumps(vars(point)))
            self._published = point
        if point.is_call:
            self._compare_points()
        self._read_refusal()

    def _read_refusal(self) -> None:
        if self._store.check([_REFUSAL]):
            content = json.loads(self._store.get(_REFUSAL))
            # Set before the wait, during which other members may leave.
            self._refusal = InvalidSpec(**{part: content[part] for part in _REFUSAL_PARTS})
            self._await_all()

    def _look_at_exchanges(self, stood_s: float) -> None:
        """Publish this member's layer exchanges, and compare them with its peers'.

        Peers with the same script have the same exchanges, even in pauses.
        """
        exchanges = self._exchanges
        compares = exchanges is not None and (exchanges.peers or exchanges.is_compared)
        if exchanges is None or not compares or stood_s < self._look_after_s:
            self._next_exchange_look_s = 0.0
            return
        if stood_s < self._next_exchange_look_s:
            return
        self._next_exchange_look_s = stood_s * NEXT_LOOK
        record = exchanges.record()
        if record is not None:
            self._store.set(_EXCHANGES.format(self._rank), json.dumps(vars(record)))
            self._compare_exchanges(exchanges.peers)
        self._read_refusal()

    def _compare_exchanges(self, peers: Sequence[int]) -> None:
        keys = [_EXCHANGES.format(rank) for rank in peers]
        if not self._store.check(keys):
            return
        records = [record_of_json(ExchangeRecord, each) for each in self._store.multi_get(keys)]
        names = [self._members[rank] for rank in peers]
        differing = difference(dict(zip(names, records, strict=True)))
        if differing is not None:
            self._publish(different_layers(describe_exchanges(differing)))

    def _compare_points(self) -> None:
        keys = [_POINT.format(rank) for rank in range(len(self._members))]
        if not self._store.check(keys):
            self._read = []
            return
        points = [record_of_json(ScriptPoint, each) for each in self._store.multi_get(keys)]
        # If points are equal in two looks in a row, no member has moved in between.
        before, self._read = self._read, points
        together = len({(each.step, each.num_calls) for each in points}) == 1
        if together and points == before and len({each.what for each in points}) > 1:
            by_member = zip(self._members, points, strict=True)
            self._publish(_different_points("; ".join(f"{m}: {p.what}" for m, p in by_member)))

    def _await_all(self) -> None:
        """Wait until all members have read the finding: the first to leave ends the generation."""
        self._store.add(_NUM_READ, 1)
        give_up_s = time.monotonic() + self._read_within_s
        while self._store.add(_NUM_READ, 0) < len(self._members) and time.monotonic() < give_up_s:
            time.sleep(_READ_CHECK_S)


def _different_points(seen: str) -> InvalidSpec:
    return InvalidSpec(
        "the members' scripts wait for each other at different points",
        seen=seen,
        expected="the same calls in the same order on every member",
        fix="Call session.evaluate, session.all_reduce and, under strategies that spread the"
        " model, session.state_dict on all members, outside of `if session.is_first`, and use"
        " the results inside. Call session.gather equally often on all members in a step. Put"
        " work of one member alone into session.pause.",
    )
