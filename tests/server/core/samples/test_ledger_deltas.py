"""A base and the deltas after it equal the whole ledger after each write."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.samples.ledger_deltas import MemberNumbers, encoded, folded
from shoal_server.core.samples.requests import LedgerRange, SampleRequest, TooManyRanges

NAMES = ("a", "b", "worker-3")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(NAMES), st.integers(0, 40)),
        st.tuples(st.just("report"), st.sampled_from(NAMES), st.integers(0, 40)),
        st.tuples(st.just("lose"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("ignore"), st.sampled_from(NAMES), st.integers(1, 9)),
        st.tuples(st.sampled_from(["delta", "failed", "base"]), st.just("a"), st.just(0)),
    ),
    max_size=80,
)


class Copy:
    """The stored form of a ledger: a base, and the deltas after it."""

    def __init__(self, ledger: SampleLedger) -> None:
        self.write_base(ledger)

    def write_base(self, ledger: SampleLedger) -> None:
        ledger.pop_touched()
        self.base = json.dumps(ledger.to_json())
        self.numbers = MemberNumbers(ledger.to_json())
        self.deltas: list[bytes] = []

    def append(self, ledger: SampleLedger, *, fails: bool = False) -> None:
        touched = ledger.pop_touched()
        part = ledger.to_json(touched)
        delta = encoded(part, touched, self.numbers)
        if fails:
            ledger.touch(touched)
            return
        self.deltas.append(delta)
        self.numbers.note(part)

    def read(self) -> dict[str, Any]:
        return SampleLedger.from_json(folded(json.loads(self.base), self.deltas)).to_json()


class Member:
    def __init__(self) -> None:
        self.incarnation, self.sequence = 0, 0
        self.held: list[LedgerRange] = []

    def request(self, name: str, num_samples: int, done: list[LedgerRange]) -> SampleRequest:
        self.sequence += 1
        return SampleRequest(
            member_id=name,
            incarnation=str(self.incarnation),
            sequence=self.sequence,
            completed=done,
            held=tuple(self.held),
            num_samples=num_samples,
        )


def apply_step(
    ledger: SampleLedger, members: dict[str, Member], step: tuple[str, str, int]
) -> None:
    what, name, number = step
    member = members[name]
    match what:
        case "lose":
            ledger.give_back(name, str(member.incarnation))
            member.incarnation, member.held, member.sequence = member.incarnation + 1, [], 0
        case "ignore":
            ledger.ignore([LedgerRange(0, 0, number)])
        case _:
            done = [member.held.pop(0)] if what == "report" and member.held else []
            try:
                found = ledger.answer(member.request(name, number, done)).range
            except TooManyRanges:
                member.held = done + member.held
                return
            if found is not None:
                member.held.append(found)


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 200), epochs=st.integers(1, 100), steps=STEPS)
def test_a_base_and_its_deltas_equal_the_ledger(
    size: int, epochs: int, steps: list[tuple[str, str, int]]
) -> None:
    """The equality also holds after failed writes and new bases."""
    ledger = SampleLedger(dataset_size=size, num_epochs=epochs)
    members = {name: Member() for name in NAMES}
    copy = Copy(ledger)
    for step in steps:
        if step[0] == "base":
            copy.write_base(ledger)
        elif step[0] in ("delta", "failed"):
            copy.append(ledger, fails=step[0] == "failed")
        else:
            apply_step(ledger, members, step)
            continue
        if step[0] != "failed":
            assert copy.read() == ledger.to_json()


def test_a_delta_of_many_members_is_small() -> None:
    """Fifty members have each completed a range and leased another: less than ten bytes each."""
    ledger = SampleLedger(dataset_size=10_000_000, num_epochs=3)
    members = {f"host-{i:02}-0": Member() for i in range(50)}
    copy = Copy(ledger)
    for _ in range(40):
        for name in members:
            apply_step(ledger, members, ("report", name, 512))
    copy.write_base(ledger)
    for name in members:
        apply_step(ledger, members, ("report", name, 512))
    copy.append(ledger)
    assert copy.read() == ledger.to_json()
    assert len(copy.deltas[0]) < 10 * len(members)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x02",
        b"\x01\xff",
        b"\x01" + b"\xff" * 40,
        b"\x01\x00\x00\x00\x00\x00\x00\x00\x00trailing",
        b"\x01\x00\x00\x00\x00\x00\x00\x01\x05\x00\x00\x00\x00",
    ],
)
def test_bytes_that_are_no_delta_are_refused(broken: bytes) -> None:
    """Deltas may be cut off, or have another format, endless numbers or unknown members."""
    base = SampleLedger(dataset_size=5, num_epochs=1).to_json()
    with pytest.raises(ValueError):
        folded(base, [broken])
