"""Record of the layers for which a rank communicated, to detect ranks that compute with different
layers.

A message does not name its layer: ranks may combine values of different layers, until one waits for
a message that never comes. Records are compared in the message that ends a step, and by a rank that
has waited for long.
"""

import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.backends.abortable.gather import barrier_after_collective, gather, record_from
from shoal_proto.errors import InvalidSpec

PASSES_END = -1
"""Entry for the end of a rank's passes."""
_SIZES, _SIZES_END = -2, -(1 << 31)
"""An entry `_SIZES - n` records that a value had n elements, `_SIZES_END` 2**31 - 2 or more."""
MAX_KEPT = 4096
"""Limit of exchanges kept one by one; above it a digest replaces the older half."""
MAX_RECORDED = 64
MAX_WORD_CHARS = 120
DIGEST_BITS, FIRST_BITS = 38, 16
"""Bits of the parts of `LayerExchanges.summary`: digest, and lowest rank of the peers."""
WORD_BITS = DIGEST_BITS + FIRST_BITS + 1
"""Bits of `LayerExchanges.summary`; the highest is set if layers are split."""


@dataclass(frozen=True, kw_only=True)
class ExchangeRecord:
    """Record of a rank's exchanges in a step. The last one may be in progress."""

    step: int
    count: int
    last: Sequence[str]

    def exchange_at(self, position: int) -> str | None:
        """Return the exchange at this position, if it is made and still kept."""
        index = position - (self.count - len(self.last))
        return self.last[index] if 0 <= index < len(self.last) else None


class ExchangeSite:
    """A layer for which ranks communicate."""

    __slots__ = ("_gradient", "_note", "_value")

    def __init__(self, exchanges: "LayerExchanges", number: int) -> None:
        self._note = exchanges.note
        self._value, self._gradient = 2 * number, 2 * number + 1

    def value(self) -> int:
        """Record that ranks exchange the layer's values now.

        Returns the exchange's number: at most 24 bits, the same on all ranks.
        """
        self._note(self._value)
        return self._value

    def gradient(self) -> int:
        """Record that ranks exchange the layer's gradients now. Returns a number as `value`
        does."""
        self._note(self._gradient)
        return self._gradient


class LayerExchanges:
    """Exchanges of one rank in one generation.

    Used by one thread at a time, the trainer's or autograd's. Another thread may call `record`
    while this thread waits.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._subjects: list[str] = []
        """Names of values exchanged in forward passes, such as "outputs", by layer."""
        self._done: list[int] = []
        self._forgotten, self._digest = 0, 0
        """Number and digest of exchanges that are not kept."""
        self._steps = 0
        self._has_ended = False
        self._whole: dict[int, nn.Parameter] = {}
        """Parameters that each rank has whole, by the exchange that records a missing gradient."""
        self._without: set[int] | None = None
        """Keys of `_whole` for parameters without a gradient from this rank's passes; None until
        `note_missing_gradients`."""
        self.peers: Sequence[int] = ()
        """The ranks that split layers with this one, itself included, if there are any."""
        self.is_compared = False
        """True if ranks that are not `peers` may report a refusal to this rank."""
        self.report_refusal: Callable[[InvalidSpec], None] = lambda refusal: None
        """Called before this rank raises a refusal that not all ranks know of."""

    def set_peers(self, peers: Sequence[int]) -> None:
        """Set the peers that split layers with this rank. With several models of different peers,
        nothing is compared."""
        differ = self._names and tuple(peers) != self.peers
        self.peers = () if differ else tuple(peers)

    def add_site(self, name: str, *, what: str = "outputs") -> ExchangeSite:
        """Add a layer; all ranks add the same ones in the same order. `what`: the values exchanged
        in forward passes."""
        self._names.append(name)
        self._subjects.append(what)
        return ExchangeSite(self, len(self._names) - 1)

    def add_whole_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the parameters that each rank has whole. The same parameters must lack a gradient on
        all ranks, as gradients are broadcast."""
        for name, parameter in parameters.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._names.append(name)
                self._subjects.append("outputs")
                self._whole[2 * (len(self._names) - 1)] = parameter

    def begin_step(self) -> None:
        self._steps += 1
        self._forgotten = self._digest = 0
        self._done, self._has_ended, self._without = [], False, None

    def note_missing_gradients(self) -> None:
        """Record the parameters without a gradient, before other ranks' gradients are added."""
        without = {exchange for exchange, each in self._whole.items() if each.grad is None}
        self._without = without if self._without is None else self._without & without

    def note(self, exchange: int) -> None:
        """Record an exchange that is about to begin."""
        if self._has_ended:
            return
        self._done.append(exchange)
        if len(self._done) > MAX_KEPT:
            self._forget(MAX_KEPT // 2)

    def stop_at_mismatch(self, size: int | None = None) -> None:
        """End the record, as exchanges were found to differ. `size`: elements of this rank's value,
        if only sizes differ."""
        if size is not None:
            self.note(_SIZES - min(size, -_SIZES_END + _SIZES))
        self._has_ended = True

    def end_passes(self) -> None:
        """End the passes of a step on this rank."""
        if self._names and not self._has_ended:
            if self._without is None:
                self.note_missing_gradients()
            self._done += sorted(self._without or ())
            self.note(PASSES_END)

    def _digest_of_all(self) -> int:
        count = self._forgotten + len(self._done)
        checksum = zlib.crc32(array("i", self._done).tobytes(), self._digest)
        return (count & ((1 << (DIGEST_BITS - 32)) - 1)) << 32 | checksum

    def check_outside_step(self, group: dist.ProcessGroup) -> None:
        """Record the end of passes outside of a step, and compare all ranks' layers. Collective;
        raises what `check_exchanges` raises."""
        if self._names:
            self.note(PASSES_END)
            record = self.record()
            own = json.dumps([self.summary(), record and vars(record)]).encode()
            digests, records = zip(*map(json.loads, gather(own, group)), strict=True)
            if ranks_that_differ(digests):
                barrier_after_collective(group)
            check_exchanges(
                digests, [each and record_from(ExchangeRecord, each) for each in records]
            )

    def record(self) -> ExchangeRecord | None:
        """Return the record for other ranks to compare, if there is any."""
        done = self._done
        if not self.peers or not done:
            return None
        count = self._forgotten + len(done)
        last = [self._description(exchange) for exchange in done[-MAX_RECORDED:]]
        return ExchangeRecord(step=self._steps, count=count, last=last)

    def summary(self) -> int:
        """Return a digest of the record, of `WORD_BITS` bits; 0 if nothing is split."""
        if not self.peers:
            return 0
        return (1 << FIRST_BITS | min(self.peers)) << DIGEST_BITS | self._digest_of_all()

    def _forget(self, num: int) -> None:
        first = self._done[:num]
        self._digest = zlib.crc32(array("i", first).tobytes(), self._digest)
        self._forgotten += num
        self._done = self._done[num:]

    def _description(self, exchange: int) -> str:
        if exchange == PASSES_END:
            return "done with its passes"
        if exchange <= _SIZES:
            return f"a value of {_SIZES - exchange} elements"
        number, is_gradient = divmod(exchange, 2)
        name = self._names[number] if number < len(self._names) else str(number)
        if exchange in self._whole:
            return f"without a gradient of {name}"[:MAX_WORD_CHARS]
        what = "gradients" if is_gradient else "".join(self._subjects[number : number + 1])
        where = f"at the {what or 'outputs'} of {name or 'the model'}"
        return where[:MAX_WORD_CHARS]


def check_exchanges(
    digests: Sequence[int], records: Sequence[ExchangeRecord | None], members: Sequence[str] = ()
) -> None:
    """Raise InvalidSpec if ranks that split layers with each other communicated for different
    layers.

    `digests`, `records`: `LayerExchanges.summary` and `.record` by rank. `members`: names by rank.
    """
    names = members or [f"rank {rank}" for rank in range(len(digests))]
    by_name = {names[r]: own for r in ranks_that_differ(digests) if (own := records[r]) is not None}
    if not by_name:
        return
    differing = difference(by_name)
    counts = {name: f"{each.count - 1} exchanges for layers" for name, each in by_name.items()}
    raise different_layers(describe_exchanges(counts if differing is None else differing))


def ranks_that_differ(digests: Sequence[int]) -> Sequence[int]:
    """Return the first group of peers that communicated for different layers. `digests`:
    `LayerExchanges.summary` by rank."""
    if all(digest == digests[0] for digest in digests):
        return ()
    groups: dict[int, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            groups.setdefault(digest >> DIGEST_BITS, []).append(rank)
    differ = (group for group in groups.values() if len({digests[rank] for rank in group}) > 1)
    return next(differ, ())


def difference(records: Mapping[str, ExchangeRecord]) -> Mapping[str, str] | None:
    """Return the exchanges at the first known position where members in the same step differ, by
    member; None if there is no such position."""
    newest = max((each.step for each in records.values()), default=0)
    same = {name: each for name, each in records.items() if each.step == newest}
    ends = [(each.count - len(each.last), each.count) for each in same.values()]
    for index in range(min((e[0] for e in ends), default=0), max((e[1] for e in ends), default=0)):
        at = {name: each.exchange_at(index) for name, each in same.items()}
        reached = {name: exchange for name, exchange in at.items() if exchange is not None}
        if len(set(reached.values())) > 1:
            return reached
    return None


def describe_exchanges(exchanges: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {where}" for name, where in exchanges.items())


def different_layers(seen: str) -> InvalidSpec:
    """Return the refusal of members that communicated for different layers. `seen`: each member's
    exchange."""
    return InvalidSpec(
        "members that split layers among them computed with different layers at the same time",
        seen=seen,
        expected="the same layers in the same order in each pass on each of these members: they"
        " compute each layer together, for the same samples",
        fix="The layers of a pass must not depend on values that differ between members, such as"
        " session.rank or a random number from Python's random module.",
    )
