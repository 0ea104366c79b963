"""What a worker writes down of its pushes and pulls, line by line, before and after each.

A line is in the file before what it tells of begins, so a worker may be killed at any instant: a
push without an answer is one whose outcome nobody knows.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class Verdict(StrEnum):
    """What its pusher knows of a push."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    """As a whole: no shard may have it."""
    UNKNOWN = "unknown"
    """Any shard may have it, once."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What a push carries: all of it follows from these."""

    seed: int
    lr: Sequence[float]
    """One a parameter group."""
    absent: Sequence[str] = ()
    """Parameters without a gradient."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A push is about to be made."""

    session: str
    sequence: int
    gradients: Gradients
    at_s: float
    """On the clock that all processes of this machine share."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """It returned."""

    session: str
    sequence: int
    verdict: Verdict
    at_s: float
    versions: Mapping[int, int]
    """Per shard; only of an acknowledged one."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Values came back, of a pull or behind a push."""

    session: str
    at_s: float
    values: Mapping[int, tuple[int, int]]
    """Per shard: version, and CRC-32 of all of its bytes."""


Event = Sent | Answered | Seen
_KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in (Sent, Answered, Seen)}


def now_s() -> float:
    return time.monotonic()


class Journal:
    """The file of one worker."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: Event) -> None:
        """Hand the line to the kernel, which keeps it whatever becomes of this process."""
        line = json.dumps([type(event).__name__, asdict(event)])
        self._file.write(line + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_journals(paths: Iterable[Path]) -> list[Event]:
    """All events of all workers. A last line that was cut off did not begin."""
    events = []
    for path in sorted(paths):
        for line in path.read_text().split("\n")[:-1]:
            name, fields = json.loads(line)
            events.append(_event(name, fields))
    return events


def _event(name: str, fields: dict[str, Any]) -> Event:
    if "gradients" in fields:
        fields["gradients"] = Gradients(**fields["gradients"])
    if "verdict" in fields:
        fields["verdict"] = Verdict(fields["verdict"])
    # JSON has no numbers for keys, and no tuples.
    if "versions" in fields:
        fields["versions"] = {int(shard): v for shard, v in fields["versions"].items()}
    if "values" in fields:
        fields["values"] = {int(s): (v[0], v[1]) for s, v in fields["values"].items()}
    return _KINDS[name](**fields)


__all__ = [
    "Answered",
    "Event",
    "Gradients",
    "Journal",
    "Seen",
    "Sent",
    "Verdict",
    "now_s",
    "read_journals",
]
