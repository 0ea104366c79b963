"""A worker's journal of its pushes and pulls: a line before each push, a line after each answer.

A push is in the file before it is sent, so a worker may be killed at any instant: the outcome of a
push without an answer is unknown.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class Verdict(StrEnum):
    """Outcome of a push as far as the worker that sent it knows."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    """Refused as a whole: no shard may have applied it."""
    UNKNOWN = "unknown"
    """Any shard may have applied it, once."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The seed and settings from which all gradients of a push are drawn."""

    seed: int
    lr: Sequence[float]
    """One learning rate per parameter group."""
    absent: Sequence[str] = ()
    """Parameters without a gradient."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A push is about to be made."""

    session: str
    sequence: int
    gradients: Gradients
    at_s: float
    """Time on the clock that all processes of this machine share."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A push has returned."""

    session: str
    sequence: int
    verdict: Verdict
    at_s: float
    versions: Mapping[int, int]
    """Version that the push made, by shard; empty unless it was acknowledged."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A pull or a push returned values."""

    session: str
    at_s: float
    values: Mapping[int, tuple[int, int]]
    """By shard: version, and CRC-32 of all of its bytes."""


Event = Sent | Answered | Seen
_KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in (Sent, Answered, Seen)}


def now_s() -> float:
    return time.monotonic()


class Journal:
    """The file of one worker."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: Event) -> None:
        """Write the line to the kernel, which keeps it even if this process is killed."""
        line = json.dumps([type(event).__name__, asdict(event)])
        self._file.write(line + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_journals(paths: Iterable[Path]) -> list[Event]:
    """Read the events of all workers. An incomplete last line is ignored: its event never began."""
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
