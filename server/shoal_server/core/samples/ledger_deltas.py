"""Deltas of a sample ledger: its changes, in a few bytes.

The whole ledger is written now and then, with deltas appended in between. A delta has, in this
order, its format, the ledger's head (counts, epochs), new members with their names, changed
members, and the members that are gone. It identifies members by numbers: first those of the whole
ledger, in order, then those that deltas added. Numbers are varints, signed ones zigzag-encoded.
Members' ranges are relative to the number of closed epochs and to the first free position.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shoal_server.core.samples.ledger import MAX_CLOSED_COUNTS

FORMAT = 1
MAX_VARINT_BYTES = 10
_NO_ANSWER, _LAST_HELD, _OTHER = range(3)
_KINDS = 3

Books = dict[str, Any]
"""The result of `SampleLedger.to_json`."""
Range = list[int]
"""Epoch, start, stop."""


class MemberNumbers:
    def __init__(self, books: Mapping[str, Any]) -> None:
        self._numbers: dict[str, int] = {}
        self._incarnations: list[str] = []
        self._names: list[str] = []
        self.num_closed: int = books["num_closed"]
        """Epochs whose counts are written already."""
        for name, member in books["members"].items():
            self.add(name, member["incarnation"])

    def add(self, name: str, incarnation: str) -> None:
        """Give a member the next number. It replaces the number of an earlier incarnation."""
        self._numbers[name] = len(self._names)
        self._names.append(name)
        self._incarnations.append(incarnation)

    def number(self, name: str, incarnation: str | None = None) -> int | None:
        """Number of a member; None if it has none, or only another incarnation has."""
        number = self._numbers.get(name)
        known = number is not None and incarnation in (None, self._incarnations[number])
        return number if known else None

    def member(self, number: int) -> tuple[str, str]:
        """Name and incarnation of the member with this number. Raises ValueError if there is
        none."""
        if not 0 <= number < len(self._names):
            raise ValueError(
                f"a delta of member {number}; expected a number below {len(self._names)}"
            )
        return self._names[number], self._incarnations[number]

    def note(self, books: Mapping[str, Any]) -> None:
        for name in sorted(books["members"]):
            incarnation = books["members"][name]["incarnation"]
            if self.number(name, incarnation) is None:
                self.add(name, incarnation)
        self.num_closed = books["num_closed"]


def encoded(books: Mapping[str, Any], touched: Collection[str], numbers: MemberNumbers) -> bytes:
    """Encode a delta. `books`: the ledger with only those touched members that still exist."""
    out = _Writer()
    out.count(FORMAT)
    _write_head(out, books, numbers.num_closed)
    origin = _origin(books)
    known: dict[int, Mapping[str, Any]] = {}
    named: list[tuple[str, Mapping[str, Any]]] = []
    for name, member in sorted(books["members"].items()):
        number = numbers.number(name, member["incarnation"])
        if number is None:
            named.append((name, member))
        else:
            known[number] = member
    out.count(len(named))
    for name, member in named:
        out.text(name)
        out.text(member["incarnation"])
        _write_member(out, member, origin)
    out.count(len(known))
    for gap, number in _gaps(known):
        out.count(gap)
        _write_member(out, known[number], origin)
    gone = (numbers.number(name) for name in touched if name not in books["members"])
    removed = [number for number in gone if number is not None]
    out.count(len(removed))
    for gap, _ in _gaps(removed):
        out.count(gap)
    return bytes(out.data)


def folded(books: Books, deltas: Iterable[bytes]) -> Books:
    """The ledger after the deltas. `SampleLedger.from_json` checks the result. Raises ValueError if
    a delta cannot be read."""
    numbers = MemberNumbers(books)
    result = {**books, "members": dict(books["members"])}
    for delta in deltas:
        _apply(result, _Reader(delta), numbers)
    return result


def _apply(books: Books, data: "_Reader", numbers: MemberNumbers) -> None:
    if (found := data.count()) != FORMAT:
        raise ValueError(f"a delta of format {found}; expected {FORMAT}")
    _read_head(books, data)
    origin, members = _origin(books), books["members"]
    for _ in range(data.count()):
        name, incarnation = data.text(), data.text()
        numbers.add(name, incarnation)
        members[name] = {"incarnation": incarnation, **_read_member(data, origin)}
    number = 0
    for _ in range(data.count()):
        number += data.count()
        name, incarnation = numbers.member(number)
        members[name] = {"incarnation": incarnation, **_read_member(data, origin)}
    number = 0
    for _ in range(data.count()):
        number += data.count()
        members.pop(numbers.member(number)[0], None)
    data.end()


def _origin(books: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and position that members' ranges are relative to."""
    starts = [epoch["free"][0][0] for epoch in books["open"] if epoch["free"]]
    return books["num_closed"], starts[0] if starts else 0


def _gaps(numbers: Iterable[int]) -> list[tuple[int, int]]:
    ordered = sorted(numbers)
    return [(b - a, b) for a, b in zip([0, *ordered], ordered, strict=False)]


def _write_head(out: "_Writer", books: Mapping[str, Any], written: int) -> None:
    for name in ("num_closed", "closed_returned", "ignored"):
        out.count(books[name])
    closed = [(epoch, returned) for epoch, returned in books["closed"] if epoch >= written]
    out.count(len(closed))
    for epoch, returned in closed:
        out.count(epoch)
        out.count(returned)
    out.count(len(books["open"]))
    for epoch in books["open"]:
        out.count(epoch["returned"])
        out.count(len(epoch["free"]))
        last = 0
        for start, stop in epoch["free"]:
            out.count(start - last)
            out.count(stop - start)
            last = stop


def _read_head(books: Books, data: "_Reader") -> None:
    for name in ("num_closed", "closed_returned", "ignored"):
        books[name] = data.count()
    closed = [[data.count(), data.count()] for _ in range(data.count())]
    books["closed"] = [*books["closed"], *closed][-MAX_CLOSED_COUNTS:]
    books["open"] = []
    for index in range(data.count()):
        returned, free, last = data.count(), [], 0
        for _ in range(data.count()):
            start = last + data.count()
            last = start + data.count()
            free.append([start, last])
        number = books["num_closed"] + index
        books["open"].append({"epoch": number, "free": free, "returned": returned})


def _write_member(out: "_Writer", member: Mapping[str, Any], origin: tuple[int, int]) -> None:
    answer: Range | None = member["answer"]
    held: list[Range] = member["held"]
    out.count(member["sequence"])
    kind = _NO_ANSWER if answer is None else _OTHER
    if held and answer == held[-1]:
        kind = _LAST_HELD
    out.count(_KINDS * len(held) + kind)
    for each in held:
        _write_range(out, each, origin)
    if answer is not None and kind == _OTHER:
        _write_range(out, answer, origin)


def _read_member(data: "_Reader", origin: tuple[int, int]) -> dict[str, Any]:
    sequence = data.count()
    num_held, kind = divmod(data.count(), _KINDS)
    held = [_read_range(data, origin) for _ in range(num_held)]
    answer = None
    if kind == _OTHER:
        answer = _read_range(data, origin)
    elif kind == _LAST_HELD:
        if not held:
            raise ValueError("a delta whose member has a last answer and holds no range")
        answer = list(held[-1])
    return {"sequence": sequence, "answer": answer, "held": held}


def _write_range(out: "_Writer", wanted: Range, origin: tuple[int, int]) -> None:
    epoch, start, stop = wanted
    out.signed(epoch - origin[0])
    out.signed(start - origin[1])
    out.count(stop - start)


def _read_range(data: "_Reader", origin: tuple[int, int]) -> Range:
    epoch, start = origin[0] + data.signed(), origin[1] + data.signed()
    return [epoch, start, start + data.count()]


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def count(self, number: int) -> None:
        while number > 0x7F:
            self.data.append(number & 0x7F | 0x80)
            number >>= 7
        self.data.append(number)

    def signed(self, number: int) -> None:
        self.count(2 * number if number >= 0 else -2 * number - 1)

    def text(self, text: str) -> None:
        encoded_text = text.encode()
        self.count(len(encoded_text))
        self.data += encoded_text


class _Reader:
    """Raises ValueError for bytes that are not a delta."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self) -> int:
        number = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise ValueError(f"a number of more than {MAX_VARINT_BYTES} bytes in a delta")

    def signed(self) -> int:
        number = self.count()
        return number // 2 if number % 2 == 0 else -(number + 1) // 2

    def text(self) -> str:
        return self._take(self.count()).decode()

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes after the end of a delta")

    def _take(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise ValueError(
                f"a delta that ends at byte {len(self._data)}, before its content does"
            )
        self._at += length
        return found
